"""The only code that touches a framework: one contract (base), one module per framework."""
