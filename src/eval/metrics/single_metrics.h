// Each metric for itself, 0..1; texts are UTF-8. What the public implementations do by accident is part of the number,
// so it is done here too.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace dropkv::eval {

// RULER. The prediction is stripped and its characters below U+0020 become newlines, the references stay as they are;
// upper and lower case are alike. Without references 0.
double StringMatchAll(std::string_view prediction, std::span<const std::string> references);   // the share found
double StringMatchPart(std::string_view prediction, std::span<const std::string> references);  // 1 where any is found

// LongBench, one reference each.

// Both sides: lower case, then without ASCII punctuation, then without the whole words a, an and the, then split at
// white space. F1 of the words, each counted as often as it comes; 0 where none is common.
double F1Score(std::string_view prediction, std::string_view reference);

// LCS F-measure of the package `rouge` 1.0.1 with its default settings: sentences end at every ".", each pair of
// sentences gives one LCS, and the words of all these as a set are divided by the distinct words of either side.
// 0 where either side has no sentence, and where the package meets Python's recursion limit: a pair of sentences whose
// LCS takes more than 990 steps back (CPython's limit of 1000, called by the official eval.py).
double RougeL(std::string_view prediction, std::string_view reference);

// The classes that the prediction contains, in order, of which those are removed that the reference properly contains.
// The official loop removes from the list it walks: the class after a removed one is not looked at, and of equal
// classes the first goes. 1 / what is left where the reference is among it, else 0. Upper and lower case differ.
double ClassificationScore(std::string_view prediction, std::string_view reference,
                           std::span<const std::string> classes);

// Share of the prediction's runs of digits that equal the digits after the reference's first "Paragraph "; without
// runs, and without digits there, 0. "07" is not "7".
double RetrievalScore(std::string_view prediction, std::string_view reference);

// Share of the prediction's runs of digits that equal the reference.
double CountScore(std::string_view prediction, std::string_view reference);

// Leading newlines stripped, the first line that contains none of `, # and //; where there is none the empty line. Its
// `ratio` of fuzzywuzzy on python-Levenshtein, whole percents: 100 where equal, else 0 where either is empty, else
// 1 - d / T with d the insertions and deletions between them and T the code points of both, in double precision, times
// 100, rounded as Python's round() does, half to even. (fuzzywuzzy without python-Levenshtein gives other numbers.)
double EditSimilarity(std::string_view prediction, std::string_view reference);

}  // namespace dropkv::eval
