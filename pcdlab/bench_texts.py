"""What the bench's sweeps ask and of what: schemas and documents of any size, the same at every call.

Knows word lists and how to combine them. Refuses to know models, tokens and timing. The texts are plain English and mean
something, so that tokenizers cut them as they cut real ones; what the answers are does not matter here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from pcdlab.schema import Field, Schema

__all__ = ["fields", "labels", "letters", "queries", "sentences", "topics"]

# 20 things × 20 states: 400 questions.
THINGS = (
    *("order", "refund", "parcel", "invoice", "account", "bill", "shop", "driver", "product", "price"),
    *("ticket", "room", "meal", "flight", "train", "phone", "doctor", "school", "team", "house"),
)
STATES = (
    *("late", "wrong", "lost", "new", "old", "good", "bad", "safe", "open", "closed"),
    *("free", "paid", "broken", "clean", "cheap", "ready", "urgent", "named", "full", "changed"),
)
CHOICES = (("hardly", "very"), ("not", "partly", "fully"), ("less", "as before", "more"))
# 25 kinds × 40 goods: 1,000 labels, a word or two of tokens each.
KINDS = (
    *("red", "green", "blue", "black", "white", "brown", "grey", "pink", "gold", "silver", "steel", "glass", "paper"),
    *("wooden", "leather", "cotton", "plastic", "stone", "large", "small", "round", "old", "new", "cheap", "light"),
)
GOODS = (
    *("table", "chair", "lamp", "bed", "desk", "door", "box", "cup", "plate", "knife", "pan", "clock", "watch"),
    *("ring", "coat", "hat", "shirt", "shoe", "bag", "belt", "book", "pen", "phone", "car", "bike", "boat", "toy"),
    *("ball", "drum", "bell", "tent", "rope", "brush", "mirror", "bottle", "basket", "blanket", "candle", "ladder"),
    "bucket",
)
# 11 things × 7 wishes: 77 topics of short queries to a bank.
MATTERS = (
    *("card", "transfer", "cash", "exchange rate", "top-up", "PIN", "account", "direct debit", "loan"),
    *("statement", "fee"),
)
WISHES = ("not working", "delayed", "lost", "limit", "how to change", "not recognised", "cancel")
ASKED = (
    "Good morning, there is something about my {}: {}. What should I do now?",
    "I have waited for two days and my {} is still not right, it says {}. Why?",
    "Could you tell me what it means when I see {} ({}) in the app?",
    "Please help me with this today if you can. {}: {}.",
    "Is it normal that the {} shows {} when I am abroad?",
)
PLACES = ("Leeds", "Oslo", "Lisbon", "Graz", "Turin", "Ghent", "Cork", "Malmö", "Brno", "Porto", "Bergen", "Vilnius")
TIMES = ("on Monday", "last week", "this morning", "in March", "two days ago", "after lunch", "on the third of May")
SENTENCES = (
    *("The {thing} from {place} arrived {time} and was {state}.", "I called the office in {place} {time}."),
    *("Nobody could tell me why the {thing} is {state}.", "We paid {number} euros for the {good} {time}."),
    *(
        "My neighbour in {place} had the same trouble with a {good}.",
        "Please look into the {thing} before it gets worse.",
    ),
    *("The {good} that you sent {time} is {state}.", "Your colleague wrote that reference {number} is closed."),
)


def fields(count: int) -> Schema:
    """A schema of short questions: yes or no, and every eighth with two or three allowed values.

    Parameters
    ----------
    count : int
        Number of fields, at most 400.

    Returns
    -------
    Schema
        One with fewer fields is the beginning of one with more.
    """
    pairs = random.Random(0).sample(list(itertools.product(THINGS, STATES)), len(THINGS) * len(STATES))
    made = []
    for number, (thing, state) in enumerate(pairs[:count]):
        asked = number % 8 == 7
        allowed = CHOICES[number // 8 % len(CHOICES)] if asked else (True, False)
        about = f"How {state} the {thing} is" if asked else f"The {thing} is {state}"
        made.append(Field(f"{state}_{thing}", allowed, about))
    return Schema(tuple(made))


def labels(count: int) -> Schema:
    """A schema of one field: which goods a text is about.

    Parameters
    ----------
    count : int
        Number of its labels, at most 1,000: distinct, of two words, in no order.
    """
    names = [f"{kind} {good}" for kind, good in itertools.product(KINDS, GOODS)]
    return Schema((Field("goods", tuple(random.Random(0).sample(names, len(names))[:count]), "What is asked for"),))


def topics() -> Schema:
    """A schema of one field of 77 labels: what a short query to a bank is about."""
    names = [f"{matter} {wish}" for matter, wish in itertools.product(MATTERS, WISHES)]
    return Schema((Field("topic", tuple(names), "What the customer writes about"),))


def queries(count: int) -> list[str]:
    """Short queries to a bank, about 15 words each."""
    draw = random.Random(0)
    return [draw.choice(ASKED).format(draw.choice(MATTERS), draw.choice(WISHES)) for _ in range(count)]


def sentences(seed: int = 0) -> Iterator[str]:
    """The sentences of an endless letter."""
    draw = random.Random(seed)
    while True:
        words = {"thing": draw.choice(THINGS), "state": draw.choice(STATES), "place": draw.choice(PLACES)}
        words |= {"time": draw.choice(TIMES), "good": draw.choice(GOODS), "number": str(draw.randint(10, 9999))}
        yield draw.choice(SENTENCES).format(**words)


def letters(count: int) -> list[str]:
    """Letters of 13 to 26 sentences, about 150 to 300 tokens each."""
    draw = random.Random(0)
    return [" ".join(itertools.islice(sentences(seed), draw.randint(13, 26))) for seed in range(count)]
