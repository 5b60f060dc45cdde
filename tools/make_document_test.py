#!/usr/bin/env python3
"""Tests of make_document.py: python3 tools/make_document_test.py"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from document_text import FACTS, PEOPLE, TOPICS, WORDS
from make_document import count_words, make_document

TOOL = pathlib.Path(__file__).with_name("make_document.py")


def occurrences(phrase, text):
    return len(re.findall(rf"\b{re.escape(phrase)}\b", text, re.IGNORECASE))


def all_prose():
    """Everything that a document can contain besides the fact."""
    patterns = [s for topic in TOPICS for part in topic.values() for s in part]
    words = [w for values in WORDS.values() for w in values]
    return "\n".join([*patterns, *words, *(" ".join(p) for p in PEOPLE)])


class MakeDocument(unittest.TestCase):
    def test_same_arguments_give_same_document(self):
        self.assertEqual(make_document(1500, 7, 0.4), make_document(1500, 7, 0.4))

    def test_does_not_depend_on_the_hash_seed(self):
        runs = [subprocess.run([sys.executable, TOOL, "--words", "400", "--seed", "3", "--json"], check=True,
                               capture_output=True, env={"PYTHONHASHSEED": h}).stdout for h in ("1", "2")]
        self.assertEqual(runs[0], runs[1])

    def test_seeds_give_different_documents(self):
        documents = {make_document(300, seed)["document"] for seed in range(20)}
        self.assertEqual(len(documents), 20)

    def test_length(self):
        for words in (50, 200, 2300, 3000, 6200, 12000):
            made = make_document(words, 11)
            self.assertEqual(made["words"], count_words(made["document"]))
            self.assertGreaterEqual(made["words"], words)
            self.assertLess(made["words"], words + 40, "at most one sentence more than asked for")

    def test_fact_stands_once(self):
        for kind in FACTS:
            for seed in range(6):
                made = make_document(2500, seed, seed / 5, kind)
                self.assertEqual(made["document"].count(made["fact"]), 1)
                self.assertEqual(occurrences(made["answer"], made["document"]), 1, made["fact"])
                self.assertEqual(occurrences(kind, made["document"]), 1, made["fact"])
                self.assertEqual(occurrences(kind.split(" the ", 1)[1], made["document"]), 1, made["fact"])

    def test_no_answer_and_no_subject_is_in_the_patterns(self):
        prose = all_prose()
        for kind, answers in FACTS.items():
            self.assertEqual(occurrences(kind.split(" the ", 1)[1].split("'")[0], prose), 0, kind)
            for answer in answers:
                self.assertEqual(occurrences(answer, prose), 0, answer)

    def test_facts_are_many_and_distinct(self):
        self.assertGreaterEqual(len(FACTS), 12)
        answers = [a.lower() for values in FACTS.values() for a in values]
        self.assertEqual(len(answers), len(set(answers)))
        for kind, values in FACTS.items():
            self.assertEqual(len(values), 20, kind)
            self.assertTrue(all(1 <= count_words(a) <= 2 for a in values), kind)

    def test_depth(self):
        for depth in (0, 0.1, 0.35, 0.5, 0.9, 1):
            made = make_document(3000, 5, depth)
            before = count_words(made["document"].split(made["fact"])[0])
            self.assertAlmostEqual(before / made["words"], depth, delta=0.015)
        self.assertTrue(make_document(3000, 5, 1)["document"].endswith(made["fact"]))

    def test_prose_is_varied(self):
        patterns = [s for topic in TOPICS for part in topic.values() for s in part]
        self.assertGreaterEqual(len(set(patterns)), 120)
        for topic in TOPICS:
            self.assertTrue(all("{p}" in opening for opening in topic["open"]), "pronouns need a name before them")
        document = make_document(3000, 2)["document"]
        sentences = re.findall(r"[^.!?]+[.!?]\"?", document)
        self.assertGreater(len(set(sentences)), 0.98 * len(sentences))
        self.assertNotRegex(document, r"[{}]|  ")
        for line in document.splitlines():
            self.assertFalse(line[:1].islower(), line)

    def test_question_answer_and_prefix_agree(self):
        for seed in range(30):
            made = make_document(60, seed)
            self.assertEqual(f"{made['answer_prefix']} {made['answer']}.", made["fact"])
            self.assertIn(made["kind"], made["question"])

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            out, meta = pathlib.Path(folder, "d.txt"), pathlib.Path(folder, "d.json")
            subprocess.run([sys.executable, TOOL, "--words", "300", "--seed", "9", "--depth", "0.25", "--out", out,
                            "--meta", meta], check=True)
            made = make_document(300, 9, 0.25)
            self.assertEqual(out.read_text(), made.pop("document") + "\n")
            self.assertEqual(json.loads(meta.read_text()), made)

    def test_wrong_arguments(self):
        for bad in (["--words", "10", "--json"], ["--words", "100", "--depth", "1.5", "--json"], ["--words", "100"]):
            run = subprocess.run([sys.executable, TOOL, *bad], capture_output=True)
            self.assertEqual(run.returncode, 2)


if __name__ == "__main__":
    unittest.main()
