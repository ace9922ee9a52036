//! Snapshot of the metrics' values at one time.

use std::collections::BTreeMap;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::latency_histogram::LatencyHistogram;
use crate::metric_declarations::{HistogramMetric, MetricDeclaration, MetricFamily, MetricKind};

/// Maximum number of series per metric. Further series are combined into one series with the label [`OTHERS_LABEL`],
/// whose value is their sum or maximum.
pub const MAX_SERIES_PER_METRIC: usize = 2_000;
/// Label of the series that combines all series above the limit [`MAX_SERIES_PER_METRIC`].
pub const OTHERS_LABEL: &str = "(others)";

/// Series of one metric: for each, the values of its labels and its current value.
type MetricSeries = Vec<(Vec<String>, f64)>;

/// Values of all metrics at one point in time, ordered by the metrics' names.
#[derive(Debug, Clone, Default)]
pub struct MetricsSnapshot {
    series_by_name: BTreeMap<&'static str, (&'static MetricDeclaration, MetricSeries)>,
    histograms_by_name: BTreeMap<&'static str, (&'static MetricDeclaration, LatencyHistogram)>,
}

impl MetricsSnapshot {
    /// Adds a series of a metric, with these labels and this value.
    pub fn add_value<const LABELS: usize>(
        &mut self,
        family: &'static MetricFamily<LABELS>,
        labels: [&str; LABELS],
        value: f64,
    ) {
        let (metric, series) = self.find_or_add_series(family.declaration());
        add_or_combine_series(series, metric.kind, value, || labels.map(str::to_owned).into());
    }

    /// Adds one series for each value. The first label is `first_label`, and the second is the value's index from 0.
    /// Series above [`MAX_SERIES_PER_METRIC`] get no labels, because labels of half a million cores would cost too
    /// much.
    pub fn add_indexed_values(
        &mut self,
        family: &'static MetricFamily<2>,
        first_label: &str,
        values: impl Iterator<Item = f64>,
    ) {
        let (metric, series) = self.find_or_add_series(family.declaration());
        for (number, value) in values.enumerate() {
            add_or_combine_series(series, metric.kind, value, || vec![first_label.to_owned(), number.to_string()]);
        }
    }

    fn find_or_add_series(
        &mut self,
        metric: &'static MetricDeclaration,
    ) -> (&'static MetricDeclaration, &mut MetricSeries) {
        (metric, &mut self.series_by_name.entry(metric.name).or_insert((metric, MetricSeries::new())).1)
    }

    /// Adds a histogram metric with its observed durations.
    pub fn add_histogram(&mut self, histogram: &'static HistogramMetric, latencies: LatencyHistogram) {
        let metric = histogram.declaration();
        self.histograms_by_name.insert(metric.name, (metric, latencies));
    }

    pub fn metric_names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.series_by_name.keys().chain(self.histograms_by_name.keys()).copied()
    }

    /// Returns the snapshot as text in the format OpenMetrics 1.0.
    pub fn to_openmetrics(&self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        let mut text = String::new();
        let _ = text::encode(&mut text, &registry);
        text
    }
}

/// Adds a series. If the metric already has [`MAX_SERIES_PER_METRIC`] series, combines it with the last one instead.
fn add_or_combine_series(
    series: &mut MetricSeries,
    kind: MetricKind,
    value: f64,
    labels: impl FnOnce() -> Vec<String>,
) {
    let is_full = series.len() == MAX_SERIES_PER_METRIC;
    match series.last_mut() {
        Some(last) if is_full => {
            if last.0.iter().any(|label| label != OTHERS_LABEL) {
                last.0.iter_mut().for_each(|label| OTHERS_LABEL.clone_into(label));
            }
            last.1 = if kind == MetricKind::MaxGauge { last.1.max(value) } else { last.1 + value };
        }
        _ => series.push((labels(), value)),
    }
}

impl Collector for MetricsSnapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (metric, latencies) in self.histograms_by_name.values() {
            let mut histogram = encoder.encode_descriptor(metric.name, metric.help, None, MetricType::Histogram)?;
            let buckets = latencies.bucket_bounds_and_counts();
            histogram.encode_histogram::<NoLabelSet>(
                latencies.total_duration_s(),
                latencies.observed_latency_count(),
                &buckets,
                None,
            )?;
        }
        for (metric, series) in self.series_by_name.values() {
            let is_counter = metric.kind == MetricKind::Counter;
            let kind = if is_counter { MetricType::Counter } else { MetricType::Gauge };
            // The encoder appends `_total` to a counter's name.
            let name = if is_counter { metric.name.trim_end_matches("_total") } else { metric.name };
            let mut family = encoder.encode_descriptor(name, metric.help, None, kind)?;
            let encode_value = |value: f64, encoder: MetricEncoder<'_>| {
                if is_counter {
                    ConstCounter::new(value).encode(encoder)
                } else {
                    ConstGauge::new(value).encode(encoder)
                }
            };
            if metric.labels.is_empty() {
                // Without labels, the encoder would write `{}` after the name, which some parsers reject.
                encode_value(series.iter().map(|(_, value)| value).sum(), family)?;
                continue;
            }
            for (values, value) in series {
                let labels: Vec<(&str, &str)> =
                    metric.labels.iter().copied().zip(values.iter().map(String::as_str)).collect();
                encode_value(*value, family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric_declarations::MetricKind::{Counter, Gauge, MaxGauge};
    use crate::metric_declarations::declare_family;
    use crate::metrics;

    metrics! {
        REPORTS: MetricFamily<0> = declare_family(Counter, "coreward_reports_total", &[], &[], "Reports");
        REJECTED: MetricFamily<1> = declare_family(Counter, "coreward_rejected_total", &["reason"], &[], "Rejections");
        LOAD: MetricFamily<2> = declare_family(MaxGauge, "coreward_load_ratio", &["server", "core"], &[], "Load");
        CONNECTIONS: MetricFamily<1> = declare_family(Gauge, "coreward_connections", &["server"], &[], "Connections");
        AGE: MetricFamily<1> = declare_family(MaxGauge, "coreward_age_seconds", &["server"], &[], "Age");
    }

    #[test]
    fn metrics_page_is_valid_openmetrics() {
        let mut snapshot = MetricsSnapshot::default();
        snapshot.add_value(&REJECTED, ["no_cores"], 3.0);
        snapshot.add_value(&LOAD, ["a \"b\"\\", "0"], 0.25);
        snapshot.add_value(&REPORTS, [], 18_446_744_073_709.0);
        let text = snapshot.to_openmetrics();
        for line in [
            "# TYPE coreward_rejected counter",
            "coreward_rejected_total{reason=\"no_cores\"} 3.0",
            "# TYPE coreward_load_ratio gauge",
            "coreward_load_ratio{server=\"a \\\"b\\\"\\\\\",core=\"0\"} 0.25",
            "coreward_reports_total 18446744073709.0",
            "# EOF",
        ] {
            assert!(text.lines().any(|text_line| text_line == line), "{line}: {text}");
        }
    }

    #[test]
    fn metric_series_above_the_limit_are_combined() {
        let mut snapshot = MetricsSnapshot::default();
        for server in 0..MAX_SERIES_PER_METRIC + 10 {
            snapshot.add_value(&CONNECTIONS, [&format!("s{server}")], 1.0);
            snapshot.add_value(&AGE, [&format!("s{server}")], server as f64);
        }
        for server in 0..MAX_SERIES_PER_METRIC / 64 + 1 {
            snapshot.add_indexed_values(&LOAD, &format!("s{server}"), (0..64).map(|core| core as f64));
        }
        let (_, loads) = &snapshot.series_by_name["coreward_load_ratio"];
        assert_eq!(loads[63 + 2 * 64], (vec!["s2".to_owned(), "63".to_owned()], 63.0));
        assert_eq!(
            (loads.len(), loads.last()),
            (MAX_SERIES_PER_METRIC, Some(&(vec![OTHERS_LABEL.to_owned(); 2], 63.0)))
        );
        for (name, last) in [("coreward_connections", 11.0), ("coreward_age_seconds", 2009.0)] {
            let (_, series) = &snapshot.series_by_name[name];
            assert_eq!(series.len(), MAX_SERIES_PER_METRIC);
            assert_eq!(series.last(), Some(&(vec![OTHERS_LABEL.to_owned()], last)));
        }
    }
}
