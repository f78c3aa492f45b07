"""Attacks on the queue: what is done to it, and how a lost or doubled job is noticed.

play       sessions that enqueue, claim and finish, for tests that fix every step
scenarios  each known way to lose or double a job, step by step; a scenario returns what went wrong
fuzz       random steps of several sessions against a model: python -m audit.fuzz SEED...
load       many producers and workers at once, with an account of every job that is checked at the end
"""
