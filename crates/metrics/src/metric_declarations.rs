//! Declarations of metrics. Each metric is declared by [`metrics!`](crate::metrics!) in the file that sets its value.

/// Daemon that serves metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// `coreward controller`
    Controller,
    /// `coreward lb`
    Lb,
    /// `coreward agent`
    Agent,
    /// `coreward dispatch`
    Dispatch,
    /// `coreward orchestrate`
    Orchestrate,
    /// `coreward rack`
    Rack,
}

impl Component {
    pub const ALL: &[Component] = &[
        Component::Controller,
        Component::Lb,
        Component::Agent,
        Component::Dispatch,
        Component::Orchestrate,
        Component::Rack,
    ];

    /// Returns the name of the component's subcommand.
    pub fn name(self) -> &'static str {
        match self {
            Component::Controller => "controller",
            Component::Lb => "lb",
            Component::Agent => "agent",
            Component::Dispatch => "dispatch",
            Component::Orchestrate => "orchestrate",
            Component::Rack => "rack",
        }
    }
}

/// Kind of a metric. It determines how the excess series are combined if a metric has too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Counter. If a metric has too many series, the excess ones are combined into their sum.
    Counter,
    /// Gauge that counts objects. If a metric has too many series, the excess ones are combined into their sum.
    Gauge,
    Histogram,
    /// Gauge of an age, a fraction or a generation. Of series in excess of the limit per metric, only the maximum is
    /// kept.
    MaxGauge,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricDeclaration {
    pub name: &'static str,
    pub kind: MetricKind,
    pub labels: &'static [&'static str],
    /// Daemons that serve the metric.
    pub components: &'static [Component],
    pub help: &'static str,
}

/// Declaration of a counter or a gauge with `LABELS` labels.
#[derive(Debug)]
pub struct MetricFamily<const LABELS: usize>(MetricDeclaration);

/// Declaration of a histogram without labels.
#[derive(Debug)]
pub struct HistogramMetric(MetricDeclaration);

/// Declares a [`MetricFamily`] of this kind. A counter's name must end with `_total`.
pub const fn declare_family<const LABELS: usize>(
    kind: MetricKind,
    name: &'static str,
    labels: &'static [&'static str; LABELS],
    components: &'static [Component],
    help: &'static str,
) -> MetricFamily<LABELS> {
    MetricFamily(MetricDeclaration { name, kind, labels, components, help })
}

/// Declares a [`HistogramMetric`].
pub const fn declare_histogram(
    name: &'static str,
    components: &'static [Component],
    help: &'static str,
) -> HistogramMetric {
    HistogramMetric(MetricDeclaration { name, kind: MetricKind::Histogram, labels: &[], components, help })
}

impl<const LABELS: usize> MetricFamily<LABELS> {
    pub const fn declaration(&self) -> &MetricDeclaration {
        &self.0
    }
}

impl HistogramMetric {
    pub const fn declaration(&self) -> &MetricDeclaration {
        &self.0
    }
}

/// Declarations of all metrics in all crates that are linked into the program, in no particular order.
#[linkme::distributed_slice]
pub static METRIC_DECLARATIONS: [&'static MetricDeclaration];

/// Declares metrics as statics, and adds them to
/// [`METRIC_DECLARATIONS`](crate::metric_declarations::METRIC_DECLARATIONS).
#[macro_export]
macro_rules! metrics {
    ($($visibility:vis $name:ident: $type:ty = $value:expr;)+) => {
        $(
            $visibility static $name: $type = $value;
            const _: () = {
                #[$crate::linkme::distributed_slice($crate::metric_declarations::METRIC_DECLARATIONS)]
                #[linkme(crate = $crate::linkme)]
                static DECLARATION: &$crate::metric_declarations::MetricDeclaration = $name.declaration();
            };
        )+
    };
}
