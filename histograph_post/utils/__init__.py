"""What every room may use: files, text, devices and memory, strict decoding."""
