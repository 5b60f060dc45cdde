"""What dropkv is measured against, written here."""
