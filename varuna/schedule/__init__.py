"""Which action a stage runs next, and how much may wait: actions, orders, the validator, the policies that decide."""
