"""`bench quorum`: how fast a lighthouse answers when all its members ask at once, beside torchft's."""
