"""Functions on texts."""


def shout(text):
    return text.upper()


def first_word(text):
    return text.split()[0]


def is_blank(text):
    return not text.strip()
