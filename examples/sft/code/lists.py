"""Functions on lists."""


def last(items):
    return items[-1]


def total(items):
    return sum(items)


def longest(items):
    return max(items, key=len)
