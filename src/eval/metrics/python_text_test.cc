#include "eval/metrics/python_text.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dropkv::eval {
namespace {

TEST(PythonText, DecodesWellFormedText) {
  EXPECT_EQ(DecodeUtf8(""), U"");
  EXPECT_EQ(DecodeUtf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), U"a\u00e9\u20ac\U0001f600");
  EXPECT_EQ(DecodeUtf8(std::string_view("\0x", 2)), std::u32string_view(U"\0x", 2));
}

TEST(PythonText, ReplacesEveryBadByte) {
  EXPECT_EQ(DecodeUtf8("\xff"), U"\ufffd");
  EXPECT_EQ(DecodeUtf8("\x80x"), U"\ufffdx");
  EXPECT_EQ(DecodeUtf8("\xe2\x82"), U"\ufffd\ufffd") << "cut off";
  EXPECT_EQ(DecodeUtf8("\xc3x"), U"\ufffdx") << "no continuation";
  EXPECT_EQ(DecodeUtf8("\xc0\xaf"), U"\ufffd\ufffd") << "overlong, two bytes";
  EXPECT_EQ(DecodeUtf8("\xe0\x80\xaf"), U"\ufffd\ufffd\ufffd") << "overlong, three bytes";
  EXPECT_EQ(DecodeUtf8("\xed\xa0\x80"), U"\ufffd\ufffd\ufffd") << "surrogate";
  EXPECT_EQ(DecodeUtf8("\xf4\x90\x80\x80"), U"\ufffd\ufffd\ufffd\ufffd") << "beyond U+10FFFF";
}

TEST(PythonText, LowersAsStrLower) {
  EXPECT_EQ(Lower(U"AZ[az@"), U"az[az@");
  EXPECT_EQ(Lower(U"\u00c0\u00d6\u00d7\u00d8\u00de\u00df"), U"\u00e0\u00f6\u00d7\u00f8\u00fe\u00df") << "Latin-1";
  EXPECT_EQ(Lower(U"\u0100\u0101\u0141\u0178"), U"\u0101\u0101\u0142\u00ff") << "Latin Extended-A";
  EXPECT_EQ(Lower(U"\u01c4\u01c5\u1e9e"), U"\u01c6\u01c6\u00df") << "digraphs, capital sharp s";
  EXPECT_EQ(Lower(U"\u0391\u03a9\u0386\u1f08"), U"\u03b1\u03c9\u03ac\u1f00") << "Greek";
  EXPECT_EQ(Lower(U"\u0401\u0410\u042f\u0460"), U"\u0451\u0430\u044f\u0461") << "Cyrillic";
  EXPECT_EQ(Lower(U"\uff21\U00010400"), U"\uff41\U00010428") << "full width, Deseret";
  EXPECT_EQ(Lower(U"\u0130"), U"i\u0307") << "dotted capital I becomes two";
  EXPECT_EQ(Lower(U"\u4e2d\U0001f600"), U"\u4e2d\U0001f600");
}

TEST(PythonText, LowersSigmaByItsPlace) {
  EXPECT_EQ(Lower(U"\u039f\u03a3"), U"\u03bf\u03c2") << "final";
  EXPECT_EQ(Lower(U"\u039f\u03a3 \u039f"), U"\u03bf\u03c2 \u03bf") << "final before a space";
  EXPECT_EQ(Lower(U"\u03a3\u039f"), U"\u03c3\u03bf") << "first";
  EXPECT_EQ(Lower(U"\u03a3"), U"\u03c3") << "alone";
}

TEST(PythonText, SplitsAtWhatPythonTakesForSpace) {
  const std::u32string text =
      U"  a\t\u00a0b\u3000c\u2009d\x1c\x85"
      U"e\u200bf ";
  EXPECT_EQ(SplitWords(text), (std::vector<std::u32string_view>{U"a", U"b", U"c", U"d", U"e\u200bf"}))
      << "U+200B is no white space";
  EXPECT_TRUE(SplitWords(U"").empty());
  EXPECT_TRUE(SplitWords(U" \n").empty());
  EXPECT_EQ(Strip(U"\u3000 x y\n"), U"x y");
  EXPECT_EQ(Strip(U" \n"), U"");
}

TEST(PythonText, KnowsDigitsAndWordCharacters) {
  for (const char32_t c : {U'0', U'9', U'\u0660', U'\u0669', U'\u0966', U'\uff19', U'\U0001d7ff'})
    EXPECT_TRUE(IsDigit(c)) << static_cast<uint32_t>(c);
  for (const char32_t c : {U'a', U'/', U':', U'\u00b2', U'\u065f', U'\u066a', U'\u2160'})
    EXPECT_FALSE(IsDigit(c)) << static_cast<uint32_t>(c);
  for (const char32_t c : {U'a', U'Z', U'_', U'7', U'\u00e9', U'\u00b2', U'\u0431', U'\u4e2d', U'\u3005', U'\u00aa'})
    EXPECT_TRUE(IsWord(c)) << static_cast<uint32_t>(c);
  for (const char32_t c : {U' ', U'-', U'\u00d7', U'\u00a0', U'\u0301', U'\u201c', U'\u2014', U'\u3001', U'\uff0c'})
    EXPECT_FALSE(IsWord(c)) << static_cast<uint32_t>(c);
}

}  // namespace
}  // namespace dropkv::eval
