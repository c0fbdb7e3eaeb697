// Lookups of a step in one call: where the newest tokens stand in the text before, and what a table knows. Right
// after a decode every cache line comes from memory, so a lookup costs the distinct lines it touches. The same in
// Python: engine/ngram.py and engine/ngram_table.py, which say what is to be found.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "api.h"

namespace {

constexpr int      kTokenBits = 21;  // of one token in a key, plus one, so that an absent one is 0
constexpr int      kOrders    = 3;
constexpr uint64_t kSpread    = 0x9E3779B97F4A7C15u;  // odd, its bits without pattern

uint64_t mask_of(int order) { return (uint64_t(1) << (kTokenBits * order)) - 1; }

// A place below `places`, as likely as any other.
size_t place_of(uint64_t key, size_t places) {
    uint64_t mixed = key * kSpread;
    mixed          = (mixed ^ (mixed >> 32)) * kSpread;
    return size_t((static_cast<unsigned __int128>(mixed) * places) >> 64);
}

// Likely next tokens by the packed tokens before them: open addressing, at most half full.
class Table {
  public:
    Table(const uint64_t * keys, const int32_t * tokens, const uint8_t * confidences, int64_t count)
        : entries_(size_t(2 * count + 1)) {
        for (int64_t i = 0; i < count; i++) {
            size_t at = place_of(keys[i], entries_.size());
            while (entries_[at].confidence >= 0) {
                at = at + 1 < entries_.size() ? at + 1 : 0;
            }
            entries_[at] = {keys[i], tokens[i], confidences[i]};
        }
    }

    // The most likely tokens after those packed in `key`, each after those before it: up to `count`, until all of
    // them are right less often than `least_reach`, which they are with the chance `reached`. Entries under `least`
    // are passed over in favour of shorter contexts.
    int chain(uint64_t key, int count, double least, double least_reach, int32_t * tokens, double * scores,
              double & reached) const {
        int found = 0;
        for (reached = 1.0; found < count && reached >= least_reach; found++) {
            if (!likely(key, least, tokens[found], scores[found])) {
                break;
            }
            reached *= scores[found];
            key = ((key << kTokenBits) | (uint64_t(tokens[found]) + 1)) & mask_of(kOrders);
        }
        return found;
    }

  private:
    struct Entry {
        uint64_t key        = 0;
        int32_t  token      = 0;
        int32_t  confidence = -1;  // 0 to 255; -1: the place is free
    };

    bool likely(uint64_t key, double least, int32_t & token, double & score) const {
        size_t places[kOrders + 1];
        for (int order = kOrders; order > 0; order--) {
            places[order] = place_of(key & mask_of(order), entries_.size());
            __builtin_prefetch(&entries_[places[order]]);
        }
        for (int order = kOrders; order > 0; order--) {
            const uint64_t part = key & mask_of(order);
            size_t         at   = places[order];
            while (entries_[at].confidence >= 0 && entries_[at].key != part) {
                at = at + 1 < entries_.size() ? at + 1 : 0;
            }
            score = entries_[at].confidence / 255.0;
            if (entries_[at].confidence >= 0 && score >= least) {
                token = entries_[at].token;
                return true;
            }
        }
        return false;
    }

    std::vector<Entry> entries_;
};

struct Match {
    int64_t start;
    int     length;  // 0: none
};

// The tokens of a text, indexed by their n-grams; as NgramIndex. A tail stands after it and is not indexed.
class Text {
  public:
    Text(int least, int longest, int most, const double * scores) : least_(least), longest_(longest), most_(most),
        scores_(scores, scores + longest + 1), newest_(64) {}

    int64_t size() const { return int64_t(tokens_.size()); }
    const int32_t * tokens() const { return tokens_.data(); }

    void extend(const int32_t * tokens, int64_t count) {
        const size_t whole = tokens_.size() + size_t(count);
        if (whole > tokens_.capacity()) {  // beforehand: what is left after an error is whole
            tokens_.reserve(2 * whole);
            before_.reserve(2 * whole);
        }
        for (int64_t i = 0; i < count; i++) {
            if (!tokens_.empty()) {
                index(size() - 1);
            }
            tokens_.push_back(tokens[i]);
        }
    }

    void truncate(int64_t length) {
        const int64_t indexed = std::max<int64_t>(length - 1, 0);
        // The last n-gram that came is the first that goes, so no place is left empty in front of a used one.
        for (int64_t end = int64_t(before_.size()) - 1; end >= indexed; end--) {
            if (end + 1 >= least_) {
                int32_t & newest = newest_[place(end, nullptr)];
                newest           = before_[size_t(end)] + 1;
                used_ -= newest == 0;
            }
        }
        before_.resize(size_t(std::min<int64_t>(indexed, int64_t(before_.size()))));
        tokens_.resize(size_t(std::min<int64_t>(std::max<int64_t>(length, 0), size())));
    }

    // The longest earlier occurrence of the newest tokens, the newest among equals.
    Match find(const int32_t * tail, int count) const {
        const int64_t last = size() + count - 1;
        if (last + 1 <= least_) {
            return {0, 0};
        }
        Match   best{0, 0};
        int64_t end = int64_t(newest_[place(last, tail)]) - 1;
        for (int tried = 0; tried < most_ && end >= 0; tried++, end = before_[size_t(end)]) {
            int length = least_;
            while (length < longest_ && end - length >= 0 && tokens_[size_t(end - length)] == at(last - length, tail)) {
                length++;
            }
            if (length > best.length) {
                best = {end + 1, length};
                if (length >= longest_) {
                    break;
                }
            }
        }
        return best;
    }

    // What follows a match: up to the end of the tail, from there on periodically.
    void go_on(Match match, const int32_t * tail, int count, int wanted, int32_t * tokens, double * scores) const {
        const int64_t period = size() + count - match.start;
        for (int i = 0; i < wanted; i++) {
            tokens[i] = i < period ? at(match.start + i, tail) : tokens[i - period];
            scores[i] = scores_[size_t(std::min<int64_t>(int64_t(match.length) + i, longest_))];
        }
    }

    // The last tokens of text and tail as a table packs them.
    uint64_t key(const int32_t * tail, int count) const {
        const int64_t whole = size() + count;
        uint64_t      key   = 0;
        for (int64_t i = std::max<int64_t>(whole - kOrders, 0); i < whole; i++) {
            key = (key << kTokenBits) | (uint64_t(at(i, tail)) + 1);
        }
        return key;
    }

  private:
    int32_t at(int64_t index, const int32_t * tail) const {
        return index < size() ? tokens_[size_t(index)] : tail[index - size()];
    }

    // Where the n-gram that ends at `end` is kept, or would be: the place of its newest occurrence.
    size_t place(int64_t end, const int32_t * tail) const {
        uint64_t key = 0;
        for (int i = least_ - 1; i >= 0; i--) {
            key = (key * kSpread) + uint64_t(at(end - i, tail)) + 1;
        }
        size_t place = place_of(key, newest_.size());
        while (newest_[place] != 0 && !same(newest_[place] - 1, end, tail)) {
            place = place + 1 < newest_.size() ? place + 1 : 0;
        }
        return place;
    }

    bool same(int64_t one, int64_t other, const int32_t * tail) const {
        for (int i = 0; i < least_; i++) {
            if (tokens_[size_t(one - i)] != at(other - i, tail)) {
                return false;
            }
        }
        return true;
    }

    // The token after `end` is known now, so the n-gram there can be found.
    void index(int64_t end) {
        if (end + 1 < least_) {
            before_.push_back(-1);
            return;
        }
        if (2 * (used_ + 1) > newest_.size()) {
            grow();
        }
        int32_t & newest = newest_[place(end, nullptr)];
        used_ += newest == 0;
        before_.push_back(newest - 1);
        newest = int32_t(end) + 1;
    }

    // In the order in which they came: see `truncate`.
    void grow() {
        std::vector<int32_t> larger(4 * newest_.size());
        newest_.swap(larger);
        for (int64_t end = least_ - 1; end < int64_t(before_.size()); end++) {
            newest_[place(end, nullptr)] = int32_t(end) + 1;
        }
    }

    int                  least_, longest_, most_;
    std::vector<double>  scores_;  // by length of the match
    std::vector<int32_t> tokens_, before_;  // for each end of an n-gram the one before it, -1: none
    std::vector<int32_t> newest_;  // by n-gram its newest end + 1, 0: free; open addressing, at most half full
    size_t               used_ = 0;
};

}  // namespace

extern "C" {

// A table of `count` different keys; null without memory.
DSPINE_API void * dspine_ngram_table(const uint64_t * keys, const int32_t * tokens, const uint8_t * confidences,
                                     int64_t count) {
    try {
        return new Table(keys, tokens, confidences, count);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

DSPINE_API void dspine_ngram_free_table(void * table) { delete static_cast<Table *>(table); }

// An empty text: matches of at least `least` tokens, told apart up to `longest`, among the newest `most` places;
// `scores` (longest + 1) is the chance of the token after a match of each length. Null without memory.
DSPINE_API void * dspine_ngram_text(int least, int longest, int most, const double * scores) {
    try {
        return new Text(least, longest, most, scores);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

DSPINE_API void dspine_ngram_free_text(void * text) { delete static_cast<Text *>(text); }

DSPINE_API int64_t dspine_ngram_size(const void * text) { return static_cast<const Text *>(text)->size(); }

DSPINE_API const int32_t * dspine_ngram_tokens(const void * text) { return static_cast<const Text *>(text)->tokens(); }

DSPINE_API void dspine_ngram_truncate(void * text, int64_t length) { static_cast<Text *>(text)->truncate(length); }

// -1 without memory, else 0.
DSPINE_API int dspine_ngram_extend(void * text, const int32_t * tokens, int64_t count) {
    try {
        static_cast<Text *>(text)->extend(tokens, count);
        return 0;
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

// Adds `confirmed` tokens to a text and looks up what may follow: up to `count` tokens of a repeat; then those that
// the table knows (null: none) and a repeat after them, together up to `count`. All tokens stand in `tokens` and their
// chances in `scores`. How many of the three kinds there are: 20 bits each, the repeat lowest; -1 without memory.
DSPINE_API int64_t dspine_ngram_look_up(void * text, const void * table, const int32_t * confirmed, int news, int count,
                                        double least, double least_reach, int32_t * tokens, double * scores) {
    Text & own = *static_cast<Text *>(text);
    try {
        own.extend(confirmed, news);
    } catch (const std::bad_alloc &) {
        return -1;
    }
    int64_t     repeats = 0, known = 0, after = 0;
    const Match match = own.find(nullptr, 0);
    if (match.length > 0) {
        own.go_on(match, nullptr, 0, count, tokens, scores);
        repeats = count;
    }
    if (table != nullptr) {
        double    reached = 0.0;
        int32_t * chain   = tokens + repeats;
        known = static_cast<const Table *>(table)->chain(own.key(nullptr, 0), count, least, least_reach, chain,
                                                         scores + repeats, reached);
        if (known > 0 && known < count && reached >= least_reach) {
            const Match further = own.find(chain, int(known));
            if (further.length > 0) {
                after = count - known;
                own.go_on(further, chain, int(known), int(after), chain + known, scores + repeats + known);
            }
        }
    }
    return repeats | (known << 20) | (after << 40);
}

// The same for what follows `tail`, which stands after the text: up to `room` tokens of a repeat, else of the table.
// How many there are: 20 bits each, the repeat lowest.
DSPINE_API int64_t dspine_ngram_after(const void * text, const void * table, const int32_t * tail, int count, int room,
                                      double least, double least_reach, int32_t * tokens, double * scores) {
    const Text & own   = *static_cast<const Text *>(text);
    const Match  match = own.find(tail, count);
    if (match.length > 0) {
        own.go_on(match, tail, count, room, tokens, scores);
        return room;
    }
    if (table == nullptr) {
        return 0;
    }
    double reached = 0.0;
    return int64_t(static_cast<const Table *>(table)->chain(own.key(tail, count), room, least, least_reach, tokens,
                                                            scores, reached))
           << 20;
}

}  // extern "C"
