// Draws tokens from rows of logits. engine/sampler.py defines what is drawn, in NumPy; this is the same, row by row on
// the thread pool.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "program.h"

namespace headway {
namespace {

constexpr float GREEDY = 1e-6f;  // as in engine/sampler.py

int spans_of(int vocabulary) { return (vocabulary + SPAN_OF_LOGITS - 1) / SPAN_OF_LOGITS; }

// One row, and what a thread needs to draw from it.
struct Row {
    const Kernels& kernels;
    const float* logits;
    int vocabulary;
    Program::Scratch& scratch;
    const float* maxima;  // of each span; null: not known

    int count(int span) const { return std::min(SPAN_OF_LOGITS, vocabulary - span * SPAN_OF_LOGITS); }

    void find_maxima() {
        if (maxima) return;
        const int spans = spans_of(vocabulary);
        scratch.maxima.resize((size_t)spans);
        for (int span = 0; span < spans; span++)
            scratch.maxima[span] = kernels.largest_logit(logits + span * SPAN_OF_LOGITS, count(span));
        maxima = scratch.maxima.data();
    }

    // No numbers become impossible, and infinity the largest number; the maxima of such spans are found again.
    void mend() {
        bool whole = true;
        for (int span = 0; span < spans_of(vocabulary); span++) whole = whole && !std::isnan(maxima[span]);
        if (whole) return;
        scratch.logits.assign(logits, logits + vocabulary);
        for (float& x : scratch.logits) x = std::isnan(x) ? -INFINITY : std::min(x, FLT_MAX);
        logits = scratch.logits.data();
        std::vector<float> found((size_t)spans_of(vocabulary));
        for (int span = 0; span < (int)found.size(); span++)
            found[span] = *std::max_element(logits + span * SPAN_OF_LOGITS, logits + span * SPAN_OF_LOGITS + count(span));
        scratch.maxima = std::move(found);
        maxima = scratch.maxima.data();
    }

    int best() const {  // the lowest id among equals
        const int span = (int)(std::max_element(maxima, maxima + spans_of(vocabulary)) - maxima);
        const float* first = logits + span * SPAN_OF_LOGITS;
        return (int)(std::max_element(first, first + count(span)) - logits);
    }

    // The ids of the `wanted` largest logits, ascending; among equal ones the lower ids.
    void keep_largest(int wanted) {
        std::vector<int32_t>& ids = scratch.ids;
        std::vector<float>& values = scratch.values;
        ids.clear();
        const int spans = spans_of(vocabulary);
        float bound = -INFINITY;
        if (spans > wanted) {  // at least so many logits reach the wanted-th largest of the maxima
            values.assign(maxima, maxima + spans);
            std::nth_element(values.begin(), values.begin() + (wanted - 1), values.end(), std::greater<float>());
            bound = values[(size_t)wanted - 1];
        }
        for (int span = 0; span < spans; span++) {
            if (maxima[span] < bound) continue;
            for (int i = span * SPAN_OF_LOGITS; i < span * SPAN_OF_LOGITS + count(span); i++)
                if (logits[i] >= bound) ids.push_back(i);
        }
        values.resize(ids.size());
        for (size_t i = 0; i < ids.size(); i++) values[i] = logits[ids[i]];
        cut(values, (size_t)wanted);
    }

    // Keep the `wanted` largest of the values, each of which belongs to the id at its place; of equal ones the first.
    void cut(std::vector<float>& values, size_t wanted) {
        std::vector<int32_t>& ids = scratch.ids;
        if (values.size() <= wanted) return;
        std::vector<float>& order = scratch.order;
        order.assign(values.begin(), values.end());
        std::nth_element(order.begin(), order.begin() + (long)(wanted - 1), order.end(), std::greater<float>());
        const float least = order[wanted - 1];
        size_t ties = wanted;
        for (float value : values) ties -= value > least;
        size_t to = 0;
        for (size_t i = 0; i < values.size(); i++) {
            const bool tie = values[i] == least && ties > 0;
            if (!(values[i] > least) && !tie) continue;
            if (tie) ties--;
            ids[to] = ids[i], values[to] = values[i], to++;
        }
        ids.resize(to), values.resize(to);
    }

    // How many of the largest weights hold so much; at least one. Only those of about the last one's size are sorted.
    size_t nucleus(double goal) {
        constexpr int SHIFT = 19, BUCKETS = (0x3f800000 >> SHIFT) + 1;  // 16 sizes an octave, up to a weight of 1
        std::vector<double>& sums = scratch.sums;
        std::vector<int32_t>& counts = scratch.counts;
        sums.assign(BUCKETS, 0), counts.assign(BUCKETS, 0);
        auto bucket_of = [](float weight) {
            int32_t bits;
            std::memcpy(&bits, &weight, 4);
            return std::min(bits >> SHIFT, BUCKETS - 1);
        };
        for (float weight : scratch.weights) {
            const int bucket = bucket_of(weight);
            sums[bucket] += weight, counts[bucket]++;
        }
        double running = 0;
        size_t wanted = 0;
        int bucket = BUCKETS - 1;
        for (; bucket > 0 && running + sums[bucket] < goal; bucket--) running += sums[bucket], wanted += (size_t)counts[bucket];
        std::vector<float>& order = scratch.order;
        order.clear();
        for (float weight : scratch.weights)
            if (bucket_of(weight) == bucket) order.push_back(weight);
        std::sort(order.begin(), order.end(), std::greater<float>());
        for (size_t i = 0; i < order.size() && (running < goal || wanted == 0); i++) running += order[i], wanted++;
        return std::max<size_t>(wanted, 1);
    }

    int draw(const Draw& d) {
        find_maxima();
        mend();
        if (d.temperature < GREEDY) return best();
        const float most = *std::max_element(maxima, maxima + spans_of(vocabulary));
        if (most == -INFINITY) return 0;
        std::vector<float>& weights = scratch.weights;
        std::vector<int32_t>& ids = scratch.ids;
        double total = 0;
        const bool few = d.top_k > 0 && d.top_k < vocabulary;
        if (few) {
            keep_largest(d.top_k);
            weights.resize(ids.size());
            for (size_t i = 0; i < ids.size(); i += SPAN_OF_LOGITS)
                total += kernels.weigh(scratch.values.data() + i, (int)std::min<size_t>(SPAN_OF_LOGITS, ids.size() - i), most,
                                       d.temperature, weights.data() + i);
        } else {
            weights.resize((size_t)vocabulary);
            std::vector<double>& sums = scratch.sums;
            sums.resize((size_t)spans_of(vocabulary));
            for (int span = 0; span < (int)sums.size(); span++) {
                sums[span] = kernels.weigh(logits + span * SPAN_OF_LOGITS, count(span), most, d.temperature,
                                           weights.data() + span * SPAN_OF_LOGITS);
                total += sums[span];
            }
            if (d.top_p >= 1 && d.min_p <= 0) {
                const auto [span, rest] = place(sums.data(), (int)sums.size(), d.u);
                return span * SPAN_OF_LOGITS + place(weights.data() + span * SPAN_OF_LOGITS, count(span), rest).first;
            }
            // Weights up to this hold at most 1 - top_p of the sum all together: what is sought lies above.
            const double slack = 1 - 1e-5;  // of the sum's rounding: the largest weight, which is 1, must pass
            float least = d.top_p < 1 ? (float)(slack * (1 - (double)d.top_p) * total / vocabulary) : 0.0f;
            if (d.min_p > 0) least = std::max(least, std::nextafter(d.min_p, 0.0f));
            ids.clear();
            size_t to = 0;
            for (int i = 0; i < vocabulary; i++)
                if (weights[i] > least) ids.push_back(i), weights[to++] = weights[i];
            weights.resize(to);
        }
        if (d.top_p < 1) cut(weights, nucleus((double)d.top_p * total));
        if (d.min_p > 0) {  // relative to the most probable token, whose weight is 1
            size_t to = 0;
            for (size_t i = 0; i < weights.size(); i++)
                if (weights[i] >= d.min_p) ids[to] = ids[i], weights[to] = weights[i], to++;
            ids.resize(to), weights.resize(to);
        }
        return ids[(size_t)place(weights.data(), (int)weights.size(), d.u).first];
    }

    // Where the running sum passes u of the total, never a place of weight 0; and how far into that place, of 1.
    template <typename T>
    static std::pair<int, double> place(const T* weights, int count, double u) {
        double total = 0;
        for (int i = 0; i < count; i++) total += weights[i];
        const double goal = std::min(std::max(u * total, 0.0), std::nextafter(total, 0.0));
        double running = 0;
        for (int i = 0; i < count; i++) {
            if (running + weights[i] > goal) return {i, (goal - running) / weights[i]};
            running += weights[i];
        }
        return {count - 1, 0.0};  // not reached: the last sum is the total
    }
};

}  // namespace

void Program::draw(const float* logits, int vocabulary, const std::vector<Draw>& draws, int32_t* tokens) {
    scratch_.resize((size_t)pool_->threads());
    const int spans = spans_of(vocabulary);
    const bool known = logits == maxima_of_ && !nodes_.empty() && vocabulary == nodes_.back().width;
    auto one = [&](int i, int worker) {
        const Draw& d = draws[i];
        Row row{kernels_, logits + (int64_t)d.row * vocabulary, vocabulary, scratch_[worker],
                known ? maxima_.data() + (int64_t)d.row * spans : nullptr};
        tokens[i] = row.draw(d);
    };
    pool_->run((int)draws.size(), one);
}

void Program::find_maxima(const float* logits, int rows, int64_t stride, int first, int last, int from_row) {
    const int vocabulary = (int)stride, spans = spans_of(vocabulary);
    for (int row = 0; row < rows; row++)
        for (int at = first; at < std::min(last, vocabulary); at += SPAN_OF_LOGITS)
            maxima_[(size_t)(from_row + row) * spans + at / SPAN_OF_LOGITS] =
                kernels_.largest_logit(logits + row * stride + at, std::min(SPAN_OF_LOGITS, vocabulary - at));
}

}  // namespace headway
