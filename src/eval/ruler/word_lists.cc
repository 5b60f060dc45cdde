#include "eval/ruler/word_lists.h"

#include <cctype>
#include <unordered_set>

namespace dropkv::eval {
namespace {

constexpr std::string_view kAdjectives =
    "able agile airy alert amber ample ancient arctic ardent autumn azure bashful blazing blissful blunt bold brave "
    "breezy brief bright brisk broad bronze calm candid careful carved casual cautious cheerful chilly civil clean "
    "clear clever coastal cobalt cold copper coral cosmic cosy crimson crisp curious curved dainty daring dark deep "
    "delicate dense distant dreamy dry dusty eager early earnest eastern elder elegant endless even exact faint fair "
    "faithful famous fancy fearless festive fierce fine firm fleet flowing fluent fond formal fragile frank free "
    "fresh friendly frosty frozen gentle giant gifted glad gleaming glossy golden graceful grand grateful grave green "
    "happy hardy hasty hazel hearty heavy hidden high hollow honest humble icy ideal idle ivory jade jolly joyful "
    "keen kind large late lavish lazy lean lively lofty lonely long loud loyal lucky lunar magic marble mellow merry "
    "mighty mild misty modern modest narrow native neat nimble noble northern novel oaken odd olive open orderly pale "
    "patient peaceful pearly plain playful pleasant plucky polar polite proud prudent purple quaint quick quiet "
    "radiant rapid rare ready regal restless rich rigid robust rosy rough round royal rugged rural rustic sacred "
    "sandy scarlet secret serene shady sharp shining shy silent silken silver simple sincere sleepy slender smooth "
    "snowy sober soft solar solemn solid southern sparse splendid stark steady steep still stormy stout strict sturdy "
    "sunny supple swift tall tame tender thick thin thrifty tidy timid tiny tranquil true upland vast velvet violet "
    "vivid warm wary western whole wide wild windy winter wise witty wooden young zealous";

constexpr std::string_view kNouns =
    "acorn almanac alpaca anchor anvil apple apron arch arrow aspen badger bagpipe balcony bamboo banjo barley barn "
    "barrel basin basket bay beacon bead bear beaver bell bench birch bishop blanket blossom boat bobbin bonfire book "
    "boot bottle bough bowl box branch brass bread brick bridge brook broom brush bucket buckle butter button cabin "
    "cable cactus camel canal candle canoe canvas canyon cape caravan carpet cart castle cave cedar cellar chain "
    "chalk chapel cherry chest chimney cider cliff cloak clock cloud clover coach coal comet compass copse cottage "
    "cotton crane crate creek cricket crown cuckoo cup curtain daisy dam deer desert desk dolphin donkey door dove "
    "dragon drum duck eagle easel ember engine falcon farm feather fence fern ferry fiddle field finch flag flame "
    "flask flint flour flute forest fork fountain fox frog garden garnet gate geese ginger glacier glove goat gorge "
    "granite grape gravel grove hamlet hammer harbor harp harvest hawk hazelnut heath hedge helmet heron hill honey "
    "horn horse hound inkwell inlet iris island ivy jacket jar jasmine jewel jug kettle kite ladder lagoon lamp "
    "lantern lark laurel leaf ledger lemon lever lichen lily lime linen lion lizard locket loom lute magnet mango "
    "mantle maple market marsh meadow medal melon mill mint mirror mitten moon moose moss mountain mule needle nest "
    "nutmeg oak oar oasis ocean onion orchard otter oven owl oyster paddle page palace panther paper parcel parrot "
    "pasture peach pebble pencil pepper piano pier pigeon pillow pine pitcher plank plough plum pond pony poppy "
    "prairie pumpkin quarry quill quilt rabbit raft rail rain raven reed ribbon ridge ring river robin rocket roof "
    "rope rose rudder saddle sail salmon sand sapling scarf school seal shawl shed shelf shell shield ship shore "
    "sickle spade sparrow spire spoon spruce squirrel stable stair star stove straw stream summit swallow swan table "
    "tailor teapot temple thicket thimble thistle thread thunder tiger timber torch tower trail trumpet tulip tunnel "
    "turtle valley vase village vine violin wagon wall walnut wharf wheat wheel whistle willow window wool wren yacht";

constexpr std::string_view kVerbs =
    "accept admire advise agree allow answer appear argue arrive assist attend bake balance become begin believe "
    "belong borrow breathe bring build buy carry catch choose claim climb collect compare cook count cross decide "
    "deliver describe discover divide draw drive earn enter escape examine explain explore fetch find finish follow "
    "forget forgive gather give greet grow guess guide hear help hide hold hope imagine improve invent invite join "
    "judge jump keep kneel knit know laugh lead learn leave lend listen lose mend mention mix move notice obey offer "
    "order paint pause plant polish pour praise prepare promise protect pull push reach read receive remember repair "
    "reply return ride rise run sail save search sell send settle sew share shout sing sit sketch sleep solve speak "
    "spend stand start steer study swim teach tell thank think throw trade travel trust try turn visit wait wake walk "
    "warn wash watch weave whisper win wonder write";

// Second parts of compounds.
constexpr std::string_view kTails =
    "bank beam bed berg bird bow brow burn cap craft crest croft dale day dell drift drop edge fall fell fire fish "
    "fold folk foot ford glass glen grain guard hall hand haven head heart hold hook house keeper kin knot land lane "
    "latch light line loft log man mark mate mead mere mist mouth neck path peak pike plume point pool port post reef "
    "rest rise road rock room root row seat seed shade shaft side sky smith song span spring stem stone storm stride "
    "swift tail thorn top track vale wake ward wash watch water way weed well wind wing wood work worth yard";

std::vector<std::string> SplitAtBlanks(std::string_view list) {
  std::vector<std::string> words;
  while (!list.empty()) {
    const size_t end = list.find(' ');
    words.emplace_back(list.substr(0, end));
    list.remove_prefix(end == std::string_view::npos ? list.size() : end + 1);
  }
  return words;
}

std::string LowerCase(std::string word) {
  for (char& c : word) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return word;
}

bool IsWord(std::string_view word) {
  for (const char c : word) {
    if (c != '-' && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z')) return false;
  }
  return !word.empty() && word.front() != '-' && word.back() != '-';
}

}  // namespace

std::vector<std::string> ReadWords(std::string_view text) {
  std::vector<std::string> words;
  std::unordered_set<std::string> seen;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (IsWord(line) && seen.insert(LowerCase(std::string(line))).second) words.emplace_back(line);
  }
  return words;
}

void MergeWords(const std::vector<std::string>& verbs, WordLists& lists) {
  std::unordered_set<std::string> seen;
  const auto add = [&](const std::vector<std::string>& from, std::vector<std::string>& to) {
    for (const std::string& word : from) {
      if (seen.insert(LowerCase(word)).second) to.push_back(word);
    }
  };
  add(lists.nouns, lists.common);
  add(lists.adjectives, lists.common);
  add(verbs, lists.common);
  std::vector<std::string> further;
  further.swap(lists.further);
  add(further, lists.further);
}

WordLists BuiltInWords() {
  WordLists lists;
  lists.nouns = SplitAtBlanks(kNouns);
  lists.adjectives = SplitAtBlanks(kAdjectives);
  const std::vector<std::string> tails = SplitAtBlanks(kTails);
  for (const std::vector<std::string>* heads : {&lists.nouns, &lists.adjectives}) {
    for (const std::string& head : *heads) {
      for (const std::string& tail : tails) {
        if (head != tail) lists.further.push_back(head + tail);
      }
    }
  }
  MergeWords(SplitAtBlanks(kVerbs), lists);
  return lists;
}

}  // namespace dropkv::eval
