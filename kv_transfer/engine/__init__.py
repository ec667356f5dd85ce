"""Transfer engines behind one protocol."""
