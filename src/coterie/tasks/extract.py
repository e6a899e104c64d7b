"""Which part of a response is the answer. One function, linear in the length of the text; rules in order:

1. Text up to the last ``</think>`` is left out. After a ``<think>`` that is never closed there is no answer.
2. ``<answer>...</answer>`` in any case; without a close tag up to the next open tag or the end. Inside nested tags the
   innermost opening counts. Of several, the last that is not empty. A box inside the tag is opened.
3. Else the last ``\\boxed{...}``, ``\\fbox{...}`` (braces balanced) or ``\\boxed x`` (one word). An unclosed box counts not.
4. Else the last ``#### x`` (to the end of the line).
5. Else the last ``the answer is x``, ``answer: x`` (to the end of the sentence or line).
6. Else the whole text, if it is a single word (``12``, ``-3.``, ``olleh``): an answer and nothing else.
7. Else None: a response without any of these has no answer.

Run-on text: within each rule, what follows a new question (``Q:``, ``Question:``, ``Problem:``, ``User:``, ``Human:``)
after the first answer is left out, so that a model that answers and then goes on with questions of its own is judged by its
answer to the one that was asked.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)(answer|think)>", re.IGNORECASE)
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-z])(\{)?", re.IGNORECASE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_PHRASE = re.compile(r"\banswer(?:[ \t]+is\b|[ \t]*:)(?:\*\*)?:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)")
_NEW_QUESTION = re.compile(r"(?:^|[\s>])(?:Q|Question|Problem|User|Human):", re.IGNORECASE)

Found = list[tuple[int, str]]  # (position of the end, text)


def extract_answer(text: str) -> str | None:
    """The answer in ``text`` without surrounding white space, or None if there is none. Never empty."""
    body = _without_thought(text)
    for rule in (_tags, _boxes, _hashes, _phrases, _single_word):
        found = [(end, answer.strip()) for end, answer in rule(body) if answer.strip()]
        if found:
            answer = _last_before_new_question(body, found)
            return _unbox(answer) if rule is _tags else answer
    return None


def well_formed(text: str) -> bool:
    """Exactly one thought that is not empty, then exactly one answer that is not empty, both closed, nothing else.

    The opening ``<think>`` may be missing, since some chat templates put it into the prompt.
    """
    body = text.strip()
    tags = [m.group().lower() for m in _TAG.finditer(body)]
    if tags and tags[0] != "<think>":
        body, tags = "<think>" + body, ["<think>", *tags]
    if tags != ["<think>", "</think>", "<answer>", "</answer>"]:
        return False
    before, thought, between, answer, after = (part.strip() for part in re.split(_TAG_PLAIN, body))
    return bool(thought and answer) and not (before or between or after)


_TAG_PLAIN = re.compile(r"</?(?:answer|think)>", re.IGNORECASE)


def _without_thought(text: str) -> str:
    """The text after the last closed thought, up to one that stays open."""
    start, end = 0, len(text)
    for m in _TAG.finditer(text):
        if m.group(2).lower() != "think":
            continue
        if m.group(1):
            start, end = m.end(), len(text)
        else:
            end = min(end, m.start())
    return text[start:end]


def _tags(text: str) -> Found:
    marks = [m for m in _TAG.finditer(text) if m.group(2).lower() == "answer"]
    out = []
    for i, m in enumerate(marks):
        if not m.group(1):
            end = marks[i + 1].start() if i + 1 < len(marks) else len(text)
            closed = i + 1 < len(marks) and bool(marks[i + 1].group(1))
            content = text[m.end() : end]
            content = content if closed else _cut_new_question(content)
            out.append((m.end() + len(content), content))
    return out


def _boxes(text: str) -> Found:
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return []
    closing = _closing_braces(text)
    out: Found = []
    outer_end = -1
    for m in boxes:
        if m.start() < outer_end:
            continue  # inside a box already taken
        if m.group(1):
            end = closing.get(m.end() - 1)
            if end is not None:
                out.append((end + 1, _unbox(text[m.end() : end])))
                outer_end = end
        else:
            word = re.compile(r"[ \t]+([^\s$\\{}]+)").match(text, m.end())
            if word:
                out.append((word.end(), word.group(1).rstrip(".,;")))
    return out


def _single_word(text: str) -> Found:
    words = text.split()
    return [(len(text), words[0].rstrip(".,;"))] if len(words) == 1 and not set(words[0]) & set("<>\\{}") else []


def _hashes(text: str) -> Found:
    return [(m.end(1), _cut_new_question(m.group(1))) for m in _HASHES.finditer(text)]


def _phrases(text: str) -> Found:
    marks = list(_PHRASE.finditer(text))
    out = []
    for i, m in enumerate(marks):
        rest = text[m.end() : marks[i + 1].start() if i + 1 < len(marks) else len(text)]
        line = rest.lstrip(" \t").partition("\n")[0]
        sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
        out.append((m.end() + len(sentence), sentence.strip().strip("*").strip()))
    return out


def _unbox(text: str) -> str:
    boxes = _boxes(text) if _BOX.search(text) else []
    return boxes[-1][1].strip() if boxes else text.strip()


def _closing_braces(text: str) -> dict[int, int]:
    """Position of each opening brace -> position of its closing one; escaped braces are letters."""
    out: dict[int, int] = {}
    stack: list[int] = []
    for m in _BRACE.finditer(text):
        if m.group() == "{":
            stack.append(m.start())
        elif m.group() == "}" and stack:
            out[stack.pop()] = m.start()
    return out


def _cut_new_question(text: str) -> str:
    return _NEW_QUESTION.split(text, maxsplit=1)[0]


def _last_before_new_question(text: str, found: Found) -> str:
    cut = _NEW_QUESTION.search(text, found[0][0])
    limit = cut.start() if cut else len(text)
    return [answer for end, answer in found if end <= limit][-1]


def extract_code(text: str) -> str | None:
    """The program in a response: the answer if there is a tag, else the whole; of that, the last fenced block if any.

    None if there is neither a tag nor a fence.
    """
    body = _without_thought(text)
    tagged = [content for _, content in _tags(body) if content.strip()]
    scope = tagged[-1] if tagged else body
    fenced = _FENCE.findall(scope)
    if fenced:
        return str(fenced[-1])
    return scope.strip() if tagged else None


_FENCE = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
