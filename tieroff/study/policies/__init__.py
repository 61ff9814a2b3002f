"""The published policies; a file here with a function under `@policy` is one more."""
