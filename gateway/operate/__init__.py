"""What the commands for operators do: status, verify, redact, epoch new."""
