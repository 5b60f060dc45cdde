#include "eval/ruler/prose.h"

#include <array>
#include <cctype>
#include <string_view>
#include <unordered_set>

#include "eval/ruler/random_stream.h"

namespace dropkv::eval {
namespace {

using Phrase = std::string_view;

constexpr std::array kPeople = {
    Phrase("the old miller"),
    Phrase("a young surveyor"),
    Phrase("the harbor master"),
    Phrase("the weaver's daughter"),
    Phrase("a retired captain"),
    Phrase("the village doctor"),
    Phrase("the new schoolteacher"),
    Phrase("a traveling musician"),
    Phrase("the keeper of the lighthouse"),
    Phrase("the baker's apprentice"),
    Phrase("a quiet botanist"),
    Phrase("the mayor"),
    Phrase("the ferryman"),
    Phrase("a clockmaker"),
    Phrase("the owner of the orchard"),
    Phrase("the postman"),
    Phrase("a patient stonemason"),
    Phrase("the widow from the mill"),
    Phrase("the eldest of the sisters"),
    Phrase("a stranger in a gray coat"),
    Phrase("the librarian"),
    Phrase("the carpenter"),
    Phrase("a shepherd"),
    Phrase("the innkeeper"),
    Phrase("the judge"),
    Phrase("a painter of signs"),
    Phrase("the gardener"),
    Phrase("the blacksmith"),
    Phrase("a student of law"),
    Phrase("the bell ringer"),
    Phrase("the beekeeper"),
    Phrase("a printer from the city"),
    Phrase("the tailor"),
    Phrase("the fisherman's son"),
    Phrase("a merchant of spices"),
    Phrase("the organist"),
    Phrase("the night watchman"),
    Phrase("an engineer"),
    Phrase("the cook"),
    Phrase("the glassblower"),
    Phrase("a careful notary"),
    Phrase("the young pilot"),
};

constexpr std::array kActions = {
    Phrase("mended the broken fence"),
    Phrase("carried two baskets of apples"),
    Phrase("copied an old map"),
    Phrase("waited for the mail coach"),
    Phrase("counted the boats"),
    Phrase("planted a row of young trees"),
    Phrase("read a letter aloud"),
    Phrase("looked for the lost key"),
    Phrase("painted a small wooden door"),
    Phrase("bought a bag of flour"),
    Phrase("repaired the town clock"),
    Phrase("sang a song that few people knew"),
    Phrase("wrote a long list of names"),
    Phrase("listened to the rain"),
    Phrase("sold the last of the honey"),
    Phrase("measured the depth of the water"),
    Phrase("told a story about a distant island"),
    Phrase("sharpened the garden tools"),
    Phrase("asked for the way to the station"),
    Phrase("found an old coin"),
    Phrase("swept the floor"),
    Phrase("lit a lantern"),
    Phrase("fed the horses"),
    Phrase("gathered herbs for the winter"),
    Phrase("polished the brass handles"),
    Phrase("drew a picture of the bridge"),
    Phrase("packed a trunk with winter clothes"),
    Phrase("studied the stars"),
    Phrase("built a low wall of flat stones"),
    Phrase("shared a loaf of bread"),
    Phrase("practiced the violin"),
    Phrase("folded the sails"),
    Phrase("opened the windows"),
    Phrase("baked bread for the whole street"),
    Phrase("lost a glove"),
    Phrase("returned a borrowed ladder"),
    Phrase("spoke with the council"),
    Phrase("watched the herons"),
    Phrase("cleared the snow from the steps"),
    Phrase("signed the agreement"),
    Phrase("dug a narrow ditch"),
    Phrase("tasted the new cider"),
    Phrase("hung a wreath on the door"),
    Phrase("wound up the music box"),
};

constexpr std::array kPlaces = {
    Phrase("by the northern gate"),
    Phrase("in the upper valley"),
    Phrase("behind the chapel"),
    Phrase("near the stone bridge"),
    Phrase("at the edge of the forest"),
    Phrase("in the market square"),
    Phrase("on the road to the coast"),
    Phrase("below the old castle"),
    Phrase("beside the mill pond"),
    Phrase("in the garden of the school"),
    Phrase("at the end of the pier"),
    Phrase("in front of the bakery"),
    Phrase("on the far side of the river"),
    Phrase("under the great oak"),
    Phrase("in a small room above the shop"),
    Phrase("outside the town hall"),
    Phrase("along the canal"),
    Phrase("in the back of the workshop"),
    Phrase("at the foot of the hill"),
    Phrase("in the shade of the vines"),
    Phrase("between the two barns"),
    Phrase("on the steps of the library"),
    Phrase("in the harbor"),
    Phrase("close to the railway"),
    Phrase("in the kitchen of the inn"),
    Phrase("on the island"),
    Phrase("beyond the last houses"),
    Phrase("in the lower meadow"),
    Phrase("at the crossroads"),
    Phrase("next to the well"),
};

constexpr std::array kTimes = {
    Phrase("early in the morning"),
    Phrase("on the second day of the fair"),
    Phrase("shortly before noon"),
    Phrase("late in the autumn"),
    Phrase("after the first frost"),
    Phrase("on a Sunday in May"),
    Phrase("in the middle of the night"),
    Phrase("during the harvest"),
    Phrase("when the tide was low"),
    Phrase("a week after the flood"),
    Phrase("in the last days of winter"),
    Phrase("at sunset"),
    Phrase("on market day"),
    Phrase("after supper"),
    Phrase("during the long drought"),
    Phrase("before the bells rang"),
    Phrase("at the beginning of spring"),
    Phrase("once a month"),
    Phrase("on the way home"),
    Phrase("in the year of the great storm"),
    Phrase("that same evening"),
    Phrase("two days later"),
    Phrase("as soon as the fog lifted"),
    Phrase("on the eve of the wedding"),
    Phrase("for the third time that week"),
    Phrase("at the usual hour"),
    Phrase("before the shops opened"),
    Phrase("toward the end of the summer"),
};

constexpr std::array kFacts = {
    Phrase("the wind had turned to the west"),
    Phrase("the bells were silent"),
    Phrase("the river was higher than usual"),
    Phrase("nobody expected visitors"),
    Phrase("the bridge was closed"),
    Phrase("the first swallows had come back"),
    Phrase("the price of salt had doubled"),
    Phrase("the clock was wrong"),
    Phrase("the road was covered with leaves"),
    Phrase("the letter had never arrived"),
    Phrase("the shop would open again"),
    Phrase("the lamps were already burning"),
    Phrase("the harvest had been good"),
    Phrase("the ship was a day late"),
    Phrase("the snow had melted overnight"),
    Phrase("the school needed a new roof"),
    Phrase("the well had run dry"),
    Phrase("the whole street smelled of bread"),
    Phrase("the dogs had stopped barking"),
    Phrase("the old road was shorter"),
    Phrase("the ink had faded"),
    Phrase("the orchard belonged to the town"),
    Phrase("the theater was almost empty"),
    Phrase("a storm was coming"),
    Phrase("the ferry no longer ran at night"),
    Phrase("the walls were damp"),
    Phrase("the council could not agree"),
    Phrase("the honey was darker this year"),
    Phrase("the train had left without a sound"),
    Phrase("the garden had grown wild"),
};

constexpr std::array kReasons = {
    Phrase("because the winter had been long"),
    Phrase("so that nobody would lose the way"),
    Phrase("although there was little money left"),
    Phrase("without saying a word about it"),
    Phrase("as the custom of the valley required"),
    Phrase("to keep a promise made in childhood"),
    Phrase("since there was nothing else to do"),
    Phrase("to the surprise of the neighbors"),
    Phrase("in spite of the cold"),
    Phrase("because a guest was expected"),
    Phrase("so that the children could see it"),
    Phrase("as if nothing had happened"),
    Phrase("to settle an old argument"),
    Phrase("although the work was not finished"),
    Phrase("for the sake of peace"),
    Phrase("with the help of three neighbors"),
    Phrase("because the law had changed"),
    Phrase("to save a little time"),
    Phrase("until the light was gone"),
    Phrase("before anyone could object"),
    Phrase("in exchange for a warm meal"),
    Phrase("to pass the time"),
    Phrase("as the almanac had advised"),
    Phrase("with great patience"),
};

// Letters stand for phrases: P a person, A an action, L a place, T a time, F a fact, R a reason.
constexpr std::array kSentences = {
    Phrase("T, P A L."),
    Phrase("P A L, R."),
    Phrase("T, F, and P A R."),
    Phrase("P told P that F and that P once A L."),
    Phrase("Although F, P A L R."),
    Phrase("It was P who A L while P A."),
    Phrase("F; therefore P A L R."),
    Phrase("Before P A L, P A."),
    Phrase("Nobody L remembered why P A R."),
    Phrase("T, P and P A L, R."),
    Phrase("P A, P A, and F."),
    Phrase("When P A L, F."),
    Phrase("Everyone agreed that P A R, but only P knew that F."),
};

template <size_t kCount>
Phrase Choose(const std::array<Phrase, kCount>& phrases, RandomStream& random) {
  return phrases[random.Below(kCount)];
}

Phrase ChooseFor(char letter, RandomStream& random) {
  switch (letter) {
    case 'P':
      return Choose(kPeople, random);
    case 'A':
      return Choose(kActions, random);
    case 'L':
      return Choose(kPlaces, random);
    case 'T':
      return Choose(kTimes, random);
    case 'F':
      return Choose(kFacts, random);
    default:
      return Choose(kReasons, random);
  }
}

// A phrase's letter stands alone; the capitals of other words do not.
bool IsSlot(Phrase sentence, size_t at) {
  constexpr Phrase kLetters = "PALTFR";
  const auto is_letter = [&](size_t i) {
    return i < sentence.size() && std::isalpha(static_cast<unsigned char>(sentence[i])) != 0;
  };
  return kLetters.find(sentence[at]) != Phrase::npos && !is_letter(at + 1) && (at == 0 || !is_letter(at - 1));
}

std::string MakeSentence(RandomStream& random) {
  const Phrase form = Choose(kSentences, random);
  std::string sentence;
  for (size_t i = 0; i < form.size(); ++i) {
    if (!IsSlot(form, i)) {
      sentence += form[i];
      continue;
    }
    Phrase phrase = ChooseFor(form[i], random);
    while (sentence.find(phrase) != std::string::npos) phrase = ChooseFor(form[i], random);  // nobody meets himself
    sentence += phrase;
  }
  sentence[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(sentence[0])));
  return sentence;
}

}  // namespace

std::string BuiltInProse(int32_t sentences) {
  RandomStream random(DeriveKey(0, "built-in prose"));
  std::unordered_set<uint64_t> seen;  // hashes: two sentences that share one only cost the second of them
  std::string prose;
  while (seen.size() < static_cast<size_t>(sentences)) {
    const std::string sentence = MakeSentence(random);
    if (!seen.insert(DeriveKey(0, sentence)).second) continue;
    if (!prose.empty()) prose += ' ';
    prose += sentence;
  }
  return prose;
}

}  // namespace dropkv::eval
