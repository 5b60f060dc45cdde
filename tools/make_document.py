#!/usr/bin/env python3
"""Writes a long English document with one planted fact, and the question that asks for it.

Usage: make_document.py --words N [--seed S] [--depth D] [--kind K] --out FILE --meta FILE
       make_document.py --words N [--seed S] [--depth D] [--kind K] --json

The text is the chronicle of a coastal town, put together from the patterns of document_text.py: the same arguments
give the same bytes on every machine. It ends with the sentence that reaches the wanted number of words. The fact is one
sentence, `depth` of the words stand before it (0: the beginning, 1: the end), and neither its subject nor its answer
occurs anywhere else.

--json prints one object {document, question, answer, ...} to the standard output; --meta writes it without the
document. To ask a chat model: the user's turn is the document, an empty line, the question; the assistant's turn begins
with answer_prefix; the reply is right where it holds the answer as a whole word.
"""

import argparse
import json
import pathlib
import random
import string

from document_text import FACTS, PEOPLE, PRONOUNS, TOPICS, WORDS

PARAGRAPHS_PER_CHAPTER = 4
SENTENCES_PER_PARAGRAPH = (6, 8)  # opening and closing included


class Deck:
    """Hands out the items of a list in random order, and all of them before any comes again."""

    def __init__(self, rng, items):
        self._rng = rng
        self._items = list(items)
        self._left = []

    def draw(self):
        if not self._left:
            self._left = list(self._items)
            self._rng.shuffle(self._left)
        return self._left.pop()

    def draw_many(self, count):
        """`count` different items."""
        drawn = []
        while len(drawn) < count:
            item = self.draw()
            if item not in drawn:
                drawn.append(item)
        return drawn


class Writer:
    """Writes paragraphs; every choice comes from one seeded generator."""

    def __init__(self, seed):
        # A string seed is hashed with SHA-512, so the sequence does not depend on PYTHONHASHSEED or the platform.
        self._rng = random.Random(f"dropkv document {seed}")
        self._topics = Deck(self._rng, range(len(TOPICS)))
        self._sentences = [{part: Deck(self._rng, topic[part]) for part in topic} for topic in TOPICS]
        self._people = Deck(self._rng, PEOPLE)
        self._words = {name: Deck(self._rng, words) for name, words in WORDS.items()}

    def heading(self, chapter):
        month = WORDS["month"][chapter // 4 % 12]
        return f"The {WORDS['ordinal'][chapter % 4]} Week of {month}"

    def paragraph(self):
        """Sentences about one person, one place and one kind of event."""
        decks = self._sentences[self._topics.draw()]
        middle = self._rng.randint(*SENTENCES_PER_PARAGRAPH) - 2
        patterns = [decks["open"].draw(), *decks["middle"].draw_many(middle), decks["close"].draw()]
        cast = self._people.draw_many(3)
        scene = {name: self._words[name].draw() for name in ("place", "street", "village", "boat")}
        return [self._sentence(pattern, cast, scene) for pattern in patterns]

    def _sentence(self, pattern, cast, scene):
        (name, pronoun, trade), second, third = cast
        he, him, his = PRONOUNS[pronoun]
        slots = {"p": name, "s": name.split()[0], "trade": trade, "q": second[0], "r": third[0], "he": he, "him": him,
                 "his": his, "He": he.capitalize(), "His": his.capitalize(), "himself": him + "self", **scene}
        out = []
        for text, field, _, conversion in string.Formatter().parse(pattern):
            out.append(text)
            if field is not None:
                if field not in slots:
                    slots[field] = self._choose(field.rstrip("0123456789"), slots.values())
                word = slots[field]
                out.append(word[0].upper() + word[1:] if conversion == "c" else word)
        return "".join(out)

    def _choose(self, name, taken):
        while (word := self._words[name].draw()) in taken:
            pass
        return word


def count_words(text):
    return len(text.split())


def plant(sentences, fact, depth):
    """Puts `fact` at the sentence boundary whose share of the words is nearest to `depth`."""
    wanted = depth * sum(count_words(s) for _, s in sentences)
    best, before, nearest = 0, 0, abs(wanted)
    for i, (_, sentence) in enumerate(sentences, 1):
        before += count_words(sentence)
        if abs(wanted - before) < nearest:
            best, nearest = i, abs(wanted - before)
    paragraph = sentences[best - 1 if best else 0][0]
    return [*sentences[:best], (paragraph, fact), *sentences[best:]]


def make_document(words, seed=0, depth=0.5, kind=None):
    """Returns {document, question, answer, answer_prefix, fact, kind, depth, seed, words}.

    words: of the whole document, headings and fact included; met to within one sentence. kind: one of FACTS, or None
    to let the seed choose.
    """
    rng = random.Random(f"dropkv fact {seed}")
    drawn = rng.choice(sorted(FACTS))
    kind = kind or drawn
    answer = rng.choice(FACTS[kind])
    fact = f"The {kind} is {answer}."

    writer = Writer(seed)
    headings, sentences = {}, []
    total, paragraph = count_words(fact), 0
    while total < words:
        if paragraph % PARAGRAPHS_PER_CHAPTER == 0:
            headings[paragraph] = writer.heading(paragraph // PARAGRAPHS_PER_CHAPTER)
            total += count_words(headings[paragraph])
        for sentence in writer.paragraph():
            if total < words:
                sentences.append((paragraph, sentence))
                total += count_words(sentence)
        paragraph += 1

    blocks, last = [], None
    for paragraph, sentence in plant(sentences, fact, depth):
        if paragraph != last:
            if paragraph in headings:
                blocks.append(headings[paragraph])
            blocks.append(sentence)
            last = paragraph
        else:
            blocks[-1] += " " + sentence
    document = "\n\n".join(blocks)
    return {"document": document, "question": f"What is the {kind}?", "answer": answer,
            "answer_prefix": f"The {kind} is", "fact": fact, "kind": kind, "depth": depth, "seed": seed,
            "words": count_words(document)}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, required=True, help="length of the document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=float, default=0.5, help="where the fact stands: 0 beginning, 1 end")
    parser.add_argument("--kind", choices=sorted(FACTS), help="what is asked for; default: the seed chooses")
    parser.add_argument("--out", type=pathlib.Path, help="file for the document")
    parser.add_argument("--meta", type=pathlib.Path, help="file for question and answer, as JSON")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args()
    if args.words < 50:
        parser.error(f"--words: expected at least 50, got {args.words}")
    if not 0 <= args.depth <= 1:
        parser.error(f"--depth: expected 0 to 1, got {args.depth}")
    if not (args.out or args.json):
        parser.error("--out FILE or --json is needed")
    return args


def main():
    args = parse_arguments()
    result = make_document(args.words, args.seed, args.depth, args.kind)
    if args.json:
        print(json.dumps(result))
    document = result.pop("document")
    if args.out:
        args.out.write_text(document + "\n", encoding="utf-8")
    if args.meta:
        args.meta.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
