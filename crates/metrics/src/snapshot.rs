//! Snapshot of values.

use std::collections::BTreeMap;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::latency::LatencyHistogram;
use crate::table::{Kind, METRICS, Metric};

/// Limit of series per metric. The others are one series with this label: the sum, or the largest.
pub const MAX_SERIES: usize = 2_000;
/// Label of the series beyond [`MAX_SERIES`].
pub const OTHERS: &str = "(others)";

/// Values by labels.
type Series = Vec<(Vec<String>, f64)>;

#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    series: BTreeMap<&'static str, Series>,
    latencies: BTreeMap<&'static str, LatencyHistogram>,
}

impl Snapshot {
    /// Adds a value. Panics on an unknown name or wrong number of labels, which every daemon's tests cover.
    pub fn add(&mut self, name: &str, labels: &[&str], value: f64) {
        let (metric, series) = self.series(name, labels.len());
        push(series, metric.kind, value, || labels.iter().map(|label| (*label).to_owned()).collect());
    }

    /// Adds the values of a metric with two labels, the second one numbered from 0: ten thousand servers have half a
    /// million cores. Panics as [`Snapshot::add`].
    pub fn add_numbered(&mut self, name: &str, label: &str, values: impl Iterator<Item = f64>) {
        let (metric, series) = self.series(name, 2);
        for (number, value) in values.enumerate() {
            push(series, metric.kind, value, || vec![label.to_owned(), number.to_string()]);
        }
    }

    fn series(&mut self, name: &str, labels: usize) -> (&'static Metric, &mut Series) {
        let metric = find(name).unwrap_or_else(|| panic!("no metric {name}"));
        assert_eq!(labels, metric.labels.len(), "labels of {name}");
        (metric, self.series.entry(metric.name).or_default())
    }

    /// Adds a histogram. Panics on an unknown name.
    pub fn add_latencies(&mut self, name: &str, latencies: LatencyHistogram) {
        let metric = find(name).filter(|metric| metric.kind == Kind::Histogram);
        self.latencies.insert(metric.unwrap_or_else(|| panic!("no histogram {name}")).name, latencies);
    }

    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.series.keys().chain(self.latencies.keys()).copied()
    }

    /// Returns the text in OpenMetrics 1.0.
    pub fn text(&self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = text::encode(&mut text, &registry);
        text
    }
}

/// Adds a value, or combines it with the others beyond [`MAX_SERIES`].
fn push(series: &mut Series, kind: Kind, value: f64, labels: impl FnOnce() -> Vec<String>) {
    let is_full = series.len() == MAX_SERIES;
    match series.last_mut() {
        Some(last) if is_full => {
            if last.0.iter().any(|label| label != OTHERS) {
                last.0.iter_mut().for_each(|label| OTHERS.clone_into(label));
            }
            last.1 = if kind == Kind::MaxGauge { last.1.max(value) } else { last.1 + value };
        }
        _ => series.push((labels(), value)),
    }
}

fn find(name: &str) -> Option<&'static Metric> {
    METRICS.iter().find(|metric| metric.name == name)
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for metric in METRICS {
            if let Some(latencies) = self.latencies.get(metric.name) {
                let mut histogram = encoder.encode_descriptor(metric.name, metric.help, None, MetricType::Histogram)?;
                let buckets = latencies.buckets();
                histogram.encode_histogram::<NoLabelSet>(latencies.sum(), latencies.count(), &buckets, None)?;
            }
            let Some(series) = self.series.get(metric.name) else { continue };
            let counts = metric.kind == Kind::Counter;
            let kind = if counts { MetricType::Counter } else { MetricType::Gauge };
            // The encoder appends `_total` to a counter's name.
            let name = if counts { metric.name.trim_end_matches("_total") } else { metric.name };
            let mut family = encoder.encode_descriptor(name, metric.help, None, kind)?;
            let encode = |value: f64, encoder: MetricEncoder<'_>| {
                if counts { ConstCounter::new(value).encode(encoder) } else { ConstGauge::new(value).encode(encoder) }
            };
            if metric.labels.is_empty() {
                // A family without labels would get `{}` after its name, which not every reader accepts.
                encode(series.iter().map(|(_, value)| value).sum(), family)?;
                continue;
            }
            for (values, value) in series {
                let labels: Vec<(&str, &str)> =
                    metric.labels.iter().copied().zip(values.iter().map(String::as_str)).collect();
                encode(*value, family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_page_is_valid_openmetrics() {
        let mut page = Snapshot::default();
        page.add("coreward_reports_refused_total", &["no_cores"], 3.0);
        page.add("coreward_server_core_load_ratio", &["a \"b\"\\", "0"], 0.25);
        page.add("coreward_reports_accepted_total", &[], 18_446_744_073_709.0);
        let text = page.text();
        for line in [
            "# TYPE coreward_reports_refused counter",
            "coreward_reports_refused_total{reason=\"no_cores\"} 3.0",
            "# TYPE coreward_server_core_load_ratio gauge",
            "coreward_server_core_load_ratio{server=\"a \\\"b\\\"\\\\\",core=\"0\"} 0.25",
            "coreward_reports_accepted_total 18446744073709.0",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }

    #[test]
    fn excess_series_are_aggregated() {
        let mut page = Snapshot::default();
        for server in 0..MAX_SERIES + 10 {
            page.add("coreward_server_open_connections", &[&format!("s{server}")], 1.0);
            page.add("coreward_server_report_age_seconds", &[&format!("s{server}")], server as f64);
        }
        for server in 0..MAX_SERIES / 64 + 1 {
            page.add_numbered(
                "coreward_server_core_load_ratio",
                &format!("s{server}"),
                (0..64).map(|core| core as f64),
            );
        }
        let loads = &page.series["coreward_server_core_load_ratio"];
        assert_eq!(loads[63 + 2 * 64], (vec!["s2".to_owned(), "63".to_owned()], 63.0));
        assert_eq!((loads.len(), loads.last()), (MAX_SERIES, Some(&(vec![OTHERS.to_owned(); 2], 63.0))));
        for (name, last) in [("coreward_server_open_connections", 11.0), ("coreward_server_report_age_seconds", 2009.0)]
        {
            let series = &page.series[name];
            assert_eq!(series.len(), MAX_SERIES);
            assert_eq!(series.last(), Some(&(vec![OTHERS.to_owned()], last)));
        }
    }

    #[test]
    fn metric_names_follow_prometheus_conventions() {
        for metric in METRICS {
            assert!(metric.name.starts_with("coreward_"), "{}", metric.name);
            let plain =
                |name: &str| name.chars().all(|letter| letter.is_ascii_lowercase() || "_0123456789".contains(letter));
            assert!(plain(metric.name) && metric.labels.iter().all(|label| plain(label)), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
            assert_eq!(METRICS.iter().filter(|other| other.name == metric.name).count(), 1, "{}", metric.name);
            for unit in ["_ms", "_milliseconds", "_ns", "_percent", "_kb"] {
                assert!(!metric.name.contains(unit), "{}: expected base units", metric.name);
            }
        }
    }
}
