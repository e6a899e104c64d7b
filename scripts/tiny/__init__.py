"""Parts of the script that trains the model `tiny`."""
