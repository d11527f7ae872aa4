"""How long a step takes, beside other packages."""
