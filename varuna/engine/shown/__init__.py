"""Answers to people who ask to see a rank's steps: timelines of recent ones, profiles of coming ones.

In: what each step took; requests to see steps. Out: the answers, as messages. Nothing here changes a step.
"""
