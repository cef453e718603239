"""Programs that show how kvcore is used; each is also a test."""
