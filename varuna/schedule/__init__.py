"""The next action of a stage, and limits on what waits: actions, orders, the validator, the policies that decide."""
