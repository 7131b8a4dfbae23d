"""Functions on numbers."""


def add(a, b):
    return a + b


def subtract(a, b):
    return a - b


def double(x):
    return x * 2


def is_even(x):
    return x % 2 == 0


def clamp(x, low, high):
    return max(low, min(x, high))
