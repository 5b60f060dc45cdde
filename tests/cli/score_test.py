#!/usr/bin/env python3
"""`dropkv score` and `dropkv policies` as commands: exit codes, what stands where, the file that is written."""

import array
import json
import struct
import unittest

from command_line import CommandLineTest

HEADS, QUERY_HEADS, TOKENS, DIM = 2, 4, 32, 8


def safetensors(tensors, metadata):
    """tensors: name to (shape, floats)."""
    header, data = {"__metadata__": metadata}, b""
    for name, (shape, values) in tensors.items():
        part = array.array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read(path):
    """Header and a function that reads a tensor as a list."""
    with open(path, "rb") as file:
        content = file.read()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])

    def tensor(name):
        begin, end = header[name]["data_offsets"]
        code = {"F32": "f", "I32": "i", "I64": "q", "U8": "B"}[header[name]["dtype"]]
        return array.array(code, content[8 + length + begin:8 + length + end]).tolist()

    return header, tensor


class Score(CommandLineTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        norms = [1 + (j * 7) % TOKENS for j in range(TOKENS)]  # knorm keeps the smallest
        keys = [norm / DIM**0.5 for _ in range(HEADS) for norm in norms for _ in range(DIM)]
        cls.keys, cls.norms = keys, norms
        cls.tensors = {"k": ([HEADS, TOKENS, DIM], keys), "v": ([HEADS, TOKENS, DIM], keys),
                       "q": ([QUERY_HEADS, TOKENS, DIM], keys + keys)}
        cls.input = cls.write("layer.safetensors", safetensors(cls.tensors, {"scale": "0.1"}))
        cls.output = str(cls.folder / "out.safetensors")

    def score(self, *arguments):
        done = self.call("score", self.input, "--out", self.output, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        self.assertEqual(done.stderr, b"")
        return done.stdout.decode()

    def test_scores_and_keeps(self):
        text = self.score("--policy", "knorm", "--budget", "25%")
        self.assertIn("kept         8 of 32 tokens per KV head (25.0%)", text)
        header, tensor = read(self.output)
        self.assertEqual(header["kept"]["shape"], [HEADS, 8])
        want = sorted(sorted(range(TOKENS), key=lambda j: self.norms[j])[:8])
        self.assertEqual(tensor("kept"), want * HEADS)
        for got, norm in zip(tensor("score"), self.norms * HEADS):
            self.assertAlmostEqual(got, -norm, places=4)
        self.assertEqual(tensor("kept_mask"), [int(j in want) for j in range(TOKENS)] * HEADS)
        self.assertEqual(len(tensor("output_error")), QUERY_HEADS)
        self.assertEqual(header["__metadata__"]["policy"], "knorm")

    def test_ragged(self):
        self.score("--policy", "dropkv", "--heads", "ada", "--budget", "50%")
        header, tensor = read(self.output)
        total = sum(tensor("kept_mask"))
        self.assertEqual(total, HEADS * TOKENS // 2)
        if "kept_offsets" in header:
            self.assertEqual((len(tensor("kept_offsets")), tensor("kept_offsets")[-1]), (HEADS + 1, total))

    def test_json(self):
        result = json.loads(self.score("--policy", "snapkv.w8", "--compression-ratio", "0.5", "--json"))
        self.assertEqual((result["policy"], result["kept"]["per_head"]), ("snapkv.w8", [16, 16]))

    def test_refusals(self):
        rest = ["--out", str(self.folder / "none.safetensors")]
        self.refused(["score", self.input, *rest], "--policy")
        self.refused(["score", self.input, "--policy", "nothing", *rest], "--policy", "snapkv")
        self.refused(["score", self.input, "--policy", "knorm"], "--out")
        self.refused(["score", "--policy", "knorm", *rest], "safetensors", "--help")
        self.refused(["score", str(self.folder / "nowhere"), "--policy", "knorm", *rest], "nowhere")
        self.refused(["score", str(self.folder), "--policy", "knorm", *rest], "regular file", code=1)
        self.refused(["score", self.document, "--policy", "knorm", *rest], "no safetensors header")
        self.refused(["score", self.input, "--policy", "criticalkv", *rest], "criticalkv", "wo")
        self.refused(["score", self.input, "--policy", "knorm", "--out", "/dev/full"], "/dev/full")
        missing = str(self.folder / "no" / "out")
        self.refused(["score", self.input, "--policy", "knorm", "--out", missing], missing, code=1)
        short = self.write("short.safetensors", safetensors(self.tensors, {})[:-4])
        self.refused(["score", short, "--policy", "knorm", *rest], "short.safetensors", "'q'", "cut off")
        self.assertFalse((self.folder / "none.safetensors").exists())

    def test_help(self):
        done = self.call("score", "--help")
        self.assertEqual(done.returncode, 0)
        self.assertIn(b"usage: dropkv score IN.safetensors", done.stdout)

    def test_policies(self):
        done = self.call("policies")
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        for name in (b"dropkv", b"snapkv", b"knorm", b"cake"):
            self.assertIn(name, done.stdout)
        self.refused(["policies", "nothing"], "nothing")


if __name__ == "__main__":
    unittest.main()
