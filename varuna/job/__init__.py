"""What a user's script says of its job: checked arguments, the model's configuration, how tools take the Trainer.

In: a Trainer's arguments, a script. Out: values that are known to be right, or an error before anything is built.
"""
