//! Series of one metric that are kept between scrapes, and a limit of how many there are.
//!
//! Counters and the text format are prometheus-client's. Its `Family` is not used, because it grows with
//! every new label value: here, values beyond the bound are counted in one series ([`OTHER`]), and the
//! number of such values is counted too.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;

use super::catalogue::{Kind, Metric, OTHER};
use crate::sync::{Mutex, locked};

/// The values of a metric's labels, in their order.
pub(super) type Values = Vec<Cow<'static, str>>;

/// Upper bounds of the histogram buckets, in seconds.
const SECONDS: [f64; 16] = [
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0,
];

/// The same for a metric with many series.
pub(super) const FEW_SECONDS: [f64; 4] = [0.001, 0.01, 0.1, 1.0];

/// Longest value of a label, in bytes. Longer ones are truncated: names of networks and pods are shorter.
const LONGEST: usize = 320;

/// Durations, kept between scrapes.
#[derive(Debug)]
pub(super) struct Durations {
    metric: &'static Metric,
    /// Upper bounds of its buckets.
    bounds: &'static [f64],
    series: Mutex<BTreeMap<Values, Histogram>>,
    over: AtomicU64,
}

impl Durations {
    pub(super) fn new(metric: &'static Metric) -> Self {
        Self::with_bounds(metric, &SECONDS)
    }

    pub(super) fn with_bounds(metric: &'static Metric, bounds: &'static [f64]) -> Self {
        Self { metric, bounds, series: Mutex::default(), over: AtomicU64::new(0) }
    }

    pub(super) fn observe(&self, values: Values, took: Duration) {
        let mut series = locked(&self.series);
        let values = bounded(self.metric, &mut self.over(), &series, values);
        let histogram = series.entry(values).or_insert_with(|| Histogram::new(self.bounds.iter().copied()));
        histogram.observe(took.as_secs_f64());
    }

    /// Number of values beyond the bound so far.
    pub(super) fn over_bound(&self) -> (&'static Metric, u64) {
        (self.metric, self.over.load(Ordering::Relaxed))
    }

    fn over(&self) -> impl FnMut() {
        || {
            self.over.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let series = locked(&self.series);
        let mut described = describe(encoder, self.metric)?;
        for (values, histogram) in &*series {
            let labels = labelled(self.metric, values);
            histogram.encode(described.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// Numbers of one metric, gathered for one scrape.
#[derive(Debug)]
pub(super) struct Numbers {
    metric: &'static Metric,
    series: BTreeMap<Values, f64>,
    over: u64,
}

impl Numbers {
    pub(super) fn of(metric: &'static Metric) -> Self {
        Self { metric, series: BTreeMap::new(), over: 0 }
    }

    /// The number of a metric without labels.
    pub(super) fn only(metric: &'static Metric, number: f64) -> Self {
        let mut numbers = Self::of(metric);
        numbers.add(Vec::new(), number);
        numbers
    }

    /// Adds to a series.
    pub(super) fn add(&mut self, values: Values, number: f64) {
        let mut over = 0;
        let values = bounded(self.metric, &mut || over += 1, &self.series, values);
        self.over += over;
        *self.series.entry(values).or_default() += number;
    }

    /// Number of values beyond the bound.
    pub(super) fn over_bound(&self) -> (&'static Metric, u64) {
        (self.metric, self.over)
    }

    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut described = describe(encoder, self.metric)?;
        for (values, number) in &self.series {
            if values.is_empty() {
                // The only series; an empty family would be written with empty braces.
                return self.encode_number(*number, described);
            }
            let labels = labelled(self.metric, values);
            self.encode_number(*number, described.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn encode_number(&self, number: f64, series: MetricEncoder<'_>) -> fmt::Result {
        match self.metric.kind {
            Kind::Counter => ConstCounter::new(number).encode(series),
            Kind::Gauge | Kind::Seconds => ConstGauge::new(number).encode(series),
        }
    }
}

/// Returns the labels under which a value is counted: [`OTHER`] if the metric has reached its bound.
fn bounded<S>(
    metric: &Metric,
    over: &mut impl FnMut(),
    series: &BTreeMap<Values, S>,
    mut values: Values,
) -> Values {
    for value in values.iter_mut().filter(|value| value.len() > LONGEST) {
        *value = Cow::Owned(value.chars().take(LONGEST / 4).collect());
    }
    // The encoder does not escape values, and an interface's name may contain these (OpenMetrics 1.0,
    // escaped-char).
    for value in values.iter_mut().filter(|value| value.contains(['\\', '"', '\n'])) {
        *value = Cow::Owned(value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"));
    }
    if series.len() < metric.most || series.contains_key(&values) {
        return values;
    }
    over();
    values.iter().map(|_| Cow::Borrowed(OTHER)).collect()
}

fn labelled<'v>(metric: &Metric, values: &'v Values) -> Vec<(&'static str, &'v str)> {
    metric.labels.iter().zip(values).map(|((label, _), value)| (*label, value.as_ref())).collect()
}

fn describe<'e>(
    encoder: &'e mut DescriptorEncoder<'_>,
    metric: &'static Metric,
) -> Result<MetricEncoder<'e>, fmt::Error> {
    let kind = match metric.kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Seconds => MetricType::Histogram,
    };
    encoder.encode_descriptor(metric.name, metric.help, None, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEW: Metric = Metric {
        name: "netattach_few",
        kind: Kind::Counter,
        help: "Few",
        labels: &[("a", ""), ("b", "")],
        most: 2,
    };

    fn values(a: &str, b: &str) -> Values {
        vec![a.to_owned().into(), b.to_owned().into()]
    }

    #[test]
    fn what_exceeds_the_bound_is_summed() {
        let mut numbers = Numbers::of(&FEW);
        for (a, b, number) in
            [("1", "x", 1.0), ("2", "x", 2.0), ("3", "x", 4.0), ("4", "y", 8.0), ("1", "x", 16.0)]
        {
            numbers.add(values(a, b), number);
        }
        let expected = [(values("1", "x"), 17.0), (values("2", "x"), 2.0), (values("other", "other"), 12.0)];
        assert_eq!(numbers.series, BTreeMap::from(expected));
        assert_eq!(numbers.over_bound(), (&FEW, 2));
        let kept = Durations::new(&FEW);
        for number in 0..5 {
            kept.observe(values(&number.to_string(), "x"), Duration::from_millis(1));
        }
        let there: Vec<Values> = locked(&kept.series).keys().cloned().collect();
        assert_eq!(there, [values("0", "x"), values("1", "x"), values("other", "other")]);
        assert_eq!(kept.over_bound(), (&FEW, 3));
    }

    #[test]
    fn a_value_that_would_end_its_quotes_is_escaped() {
        let mut numbers = Numbers::of(&FEW);
        numbers.add(values("a\"b\\c\nd", "x"), 1.0);
        assert_eq!(numbers.series, BTreeMap::from([(values("a\\\"b\\\\c\\nd", "x"), 1.0)]));
    }

    #[test]
    fn a_long_value_is_cut() {
        let mut numbers = Numbers::of(&FEW);
        numbers.add(values(&"ä".repeat(400), "x"), 1.0);
        assert_eq!(numbers.series, BTreeMap::from([(values(&"ä".repeat(80), "x"), 1.0)]));
    }
}
