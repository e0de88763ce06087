"""The `histograph` command: it parses, calls the library and prints."""
