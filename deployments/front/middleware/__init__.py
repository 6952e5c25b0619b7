"""What stands around all routes: bounds on bodies, errors in each API's form, and CORS."""
