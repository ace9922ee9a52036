//! Distributions of the requests' service times.

use std::fmt;
use std::str::FromStr;

use rand::Rng;

use super::ticks::{TICKS_PER_SERVICE_TIME_UNIT, Tick, time_units_to_ticks};
use crate::random::{draw_exponential, draw_log_normal};
use crate::unknown_name::UnknownName;

/// Distribution of service times. The unit of time is the service time of the shortest class, or the mean if there are
/// no classes.
#[derive(Debug, Clone, PartialEq)]
pub enum ServiceTimeDistribution {
    /// Every request takes 1 unit (`fixed`).
    Fixed,
    /// Service times have an exponential distribution with mean 1 (`exp`).
    Exponential,
    /// Service times have a lognormal distribution with mean 1 (`lognormal:SIGMA`). SIGMA is the standard deviation of
    /// the logarithm.
    LogNormalWithSigma(f64),
    /// The given fractions of the requests take FACTOR units, and the others take 1 unit (`bimodal:FRACTION:FACTOR` or
    /// `trimodal:FRACTION:FACTOR:FRACTION:FACTOR`).
    Multimodal(Vec<LongRequestClass>),
}

/// Class of requests that take longer than the shortest class.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LongRequestClass {
    /// Fraction of all requests that belong to this class, from 0 to 1.
    pub request_fraction: f64,
    /// Service time of the class as a multiple of the shortest class's service time, at least 1.
    pub service_time_factor: f64,
}

/// Reason why a text does not describe a distribution of service times.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ServiceTimeError {
    /// No distribution has the requested name.
    #[error(transparent)]
    UnknownName(#[from] UnknownName),
    /// The parameters of a distribution are invalid.
    #[error("service {distribution_text:?}: expected {expected}")]
    InvalidParameters { distribution_text: String, expected: &'static str },
    #[error("service {distribution_text:?}: fraction {fraction}: expected a number from 0 to 1")]
    InvalidFraction { distribution_text: String, fraction: f64 },
    #[error("service {distribution_text:?}: the fractions add up to {fraction_sum}: expected at most 1")]
    FractionSumTooLarge { distribution_text: String, fraction_sum: f64 },
    /// The service time of a long class is out of range, or is not a number.
    #[error(
        "service {distribution_text:?}: factor {factor}: expected a number from 1 to 1000000 (the unit is the \
         shortest class)"
    )]
    InvalidFactor { distribution_text: String, factor: f64 },
}

const FIXED_SERVICE_SYNTAX: &str = "fixed";
const EXPONENTIAL_SERVICE_SYNTAX: &str = "exp";
const LOG_NORMAL_SERVICE_SYNTAX: &str = "lognormal:SIGMA";
const BIMODAL_SERVICE_SYNTAX: &str = "bimodal:FRACTION:FACTOR";
const TRIMODAL_SERVICE_SYNTAX: &str = "trimodal:FRACTION:FACTOR:FRACTION:FACTOR";
/// Maximum service time of a class in units. It ensures that the ticks of a run of any length fit into 64 bits.
const MAX_CLASS_SERVICE_TIME: f64 = 1e6;
/// Maximum sigma. If it were larger, the few longest requests of a run would determine the run's mean.
const MAX_LOG_NORMAL_SIGMA: f64 = 4.0;

impl FromStr for ServiceTimeDistribution {
    type Err = ServiceTimeError;

    fn from_str(service_text: &str) -> Result<Self, ServiceTimeError> {
        let (name, parameters) = service_text
            .split_once(':')
            .map_or((service_text, None), |(name, parameter_text)| (name, Some(parameter_text)));
        let numbers: Option<Vec<f64>> = parameters.map_or(Some(Vec::new()), |parameter_text| {
            parameter_text.split(':').map(|number| number.parse().ok()).collect()
        });
        let parameter_error =
            |expected| ServiceTimeError::InvalidParameters { distribution_text: service_text.to_owned(), expected };
        match (name, numbers.as_deref()) {
            ("fixed", Some([])) => Ok(Self::Fixed),
            ("exp", Some([])) => Ok(Self::Exponential),
            ("lognormal", Some(&[sigma])) if sigma > 0.0 && sigma <= MAX_LOG_NORMAL_SIGMA => {
                Ok(Self::LogNormalWithSigma(sigma))
            }
            ("bimodal", Some(numbers)) if numbers.len() == 2 => Self::parse_classes(service_text, numbers),
            ("trimodal", Some(numbers)) if numbers.len() == 4 => Self::parse_classes(service_text, numbers),
            ("fixed", _) => Err(parameter_error(FIXED_SERVICE_SYNTAX)),
            ("exp", _) => Err(parameter_error(EXPONENTIAL_SERVICE_SYNTAX)),
            ("lognormal", _) => Err(parameter_error("lognormal:SIGMA with SIGMA above 0, at most 4")),
            ("bimodal", _) => Err(parameter_error(BIMODAL_SERVICE_SYNTAX)),
            ("trimodal", _) => Err(parameter_error(TRIMODAL_SERVICE_SYNTAX)),
            _ => {
                let known_forms = [
                    FIXED_SERVICE_SYNTAX,
                    EXPONENTIAL_SERVICE_SYNTAX,
                    LOG_NORMAL_SERVICE_SYNTAX,
                    BIMODAL_SERVICE_SYNTAX,
                    TRIMODAL_SERVICE_SYNTAX,
                ];
                Err(UnknownName::new("service", service_text, known_forms).into())
            }
        }
    }
}

impl fmt::Display for ServiceTimeDistribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed => f.write_str(FIXED_SERVICE_SYNTAX),
            Self::Exponential => f.write_str(EXPONENTIAL_SERVICE_SYNTAX),
            Self::LogNormalWithSigma(sigma) => write!(f, "lognormal:{sigma}"),
            Self::Multimodal(classes) => {
                f.write_str(if classes.len() == 1 { "bimodal" } else { "trimodal" })?;
                classes
                    .iter()
                    .try_for_each(|class| write!(f, ":{}:{}", class.request_fraction, class.service_time_factor))
            }
        }
    }
}

impl ServiceTimeDistribution {
    fn parse_classes(service_text: &str, numbers: &[f64]) -> Result<Self, ServiceTimeError> {
        let owned_service_text = || service_text.to_owned();
        let parse_class = |fraction_and_factor: &[f64]| {
            let [fraction, factor] = [fraction_and_factor[0], fraction_and_factor[1]];
            if !(0.0..=1.0).contains(&fraction) {
                return Err(ServiceTimeError::InvalidFraction { distribution_text: owned_service_text(), fraction });
            }
            if !(1.0..=MAX_CLASS_SERVICE_TIME).contains(&factor) {
                return Err(ServiceTimeError::InvalidFactor { distribution_text: owned_service_text(), factor });
            }
            Ok(LongRequestClass { request_fraction: fraction, service_time_factor: factor })
        };
        let classes: Vec<LongRequestClass> = numbers.chunks(2).map(parse_class).collect::<Result<_, _>>()?;
        let fraction_sum: f64 = classes.iter().map(|class| class.request_fraction).sum();
        if fraction_sum > 1.0 {
            return Err(ServiceTimeError::FractionSumTooLarge {
                distribution_text: owned_service_text(),
                fraction_sum,
            });
        }
        Ok(Self::Multimodal(classes))
    }

    pub fn mean(&self) -> f64 {
        match self {
            Self::Fixed | Self::Exponential | Self::LogNormalWithSigma(_) => 1.0,
            Self::Multimodal(classes) => {
                1.0 + classes
                    .iter()
                    .map(|class| class.request_fraction * (class.service_time_factor - 1.0))
                    .sum::<f64>()
            }
        }
    }

    /// Returns the service time of each class in units, beginning with the shortest. Without classes, returns only the
    /// mean.
    pub fn class_service_times(&self) -> Vec<f64> {
        let long_classes: &[LongRequestClass] = if let Self::Multimodal(classes) = self { classes } else { &[] };
        std::iter::once(1.0).chain(long_classes.iter().map(|class| class.service_time_factor)).collect()
    }

    pub fn build_sampler(&self) -> ServiceTimeSampler {
        match self {
            Self::Fixed => ServiceTimeSampler::Classes(ServiceTimeClassSampler::new(&[])),
            Self::Exponential => ServiceTimeSampler::Exponential,
            Self::LogNormalWithSigma(sigma) => ServiceTimeSampler::LogNormalWithSigma(*sigma),
            Self::Multimodal(classes) => ServiceTimeSampler::Classes(ServiceTimeClassSampler::new(classes)),
        }
    }
}

#[derive(Debug, Clone)]
pub enum ServiceTimeSampler {
    /// Exponential distribution with mean 1.
    Exponential,
    /// Lognormal distribution with mean 1 and this sigma.
    LogNormalWithSigma(f64),
    Classes(ServiceTimeClassSampler),
}

const MAX_SERVICE_TIME_CLASSES: usize = 3;

/// Sampler of a request's class. A random 32-bit number selects the first class i for which it is below
/// `class_thresholds[i]`.
#[derive(Debug, Clone)]
pub struct ServiceTimeClassSampler {
    class_random_upper_bounds: [u64; MAX_SERVICE_TIME_CLASSES],
    service_time_by_class: [Tick; MAX_SERVICE_TIME_CLASSES],
}

impl ServiceTimeClassSampler {
    fn new(long_classes: &[LongRequestClass]) -> Self {
        let mut sampler = Self {
            class_random_upper_bounds: [1 << 32; MAX_SERVICE_TIME_CLASSES],
            service_time_by_class: [TICKS_PER_SERVICE_TIME_UNIT; MAX_SERVICE_TIME_CLASSES],
        };
        let mut cumulative_fraction = 1.0 - long_classes.iter().map(|class| class.request_fraction).sum::<f64>();
        for (index, class) in long_classes.iter().enumerate() {
            sampler.class_random_upper_bounds[index] = (cumulative_fraction * f64::from(1u32 << 31) * 2.0 + 0.5) as u64;
            sampler.service_time_by_class[index + 1] = time_units_to_ticks(class.service_time_factor);
            cumulative_fraction += class.request_fraction;
        }
        sampler
    }
}

impl ServiceTimeSampler {
    /// Draws the class and the service time of a request.
    #[inline]
    pub fn sample_class_and_time(&self, rng: &mut impl Rng) -> (u8, Tick) {
        match self {
            Self::Exponential => (0, time_units_to_ticks(draw_exponential(rng))),
            // The mean of a lognormal distribution is exp(mu + sigma^2 / 2), which this mu makes 1.
            Self::LogNormalWithSigma(sigma) => {
                (0, time_units_to_ticks(draw_log_normal(rng, -sigma * sigma / 2.0, *sigma)))
            }
            Self::Classes(class_sampler) => {
                let random_number = u64::from(rng.next_u32());
                let class_index = usize::from(random_number >= class_sampler.class_random_upper_bounds[0])
                    + usize::from(random_number >= class_sampler.class_random_upper_bounds[1]);
                (class_index as u8, class_sampler.service_time_by_class[class_index])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::seeded_rng;

    use super::*;
    use crate::rpc::ticks::ticks_to_time_units;

    #[test]
    fn distribution_names_round_trip() {
        for name in ["fixed", "exp", "lognormal:1.5", "bimodal:0.1:5", "trimodal:0.1:5:0.01:50"] {
            assert_eq!(name.parse::<ServiceTimeDistribution>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn invalid_service_times_are_rejected() {
        let parsing_error_text = |text: &str| text.parse::<ServiceTimeDistribution>().unwrap_err().to_string();
        assert_eq!(
            parsing_error_text("bimodal:1.1:5"),
            "service \"bimodal:1.1:5\": fraction 1.1: expected a number from 0 to 1"
        );
        assert_eq!(parsing_error_text("bimodal:0.1"), "service \"bimodal:0.1\": expected bimodal:FRACTION:FACTOR");
        assert!(parsing_error_text("bimodal:0.1:0.5").contains("factor 0.5: expected a number from 1"));
        assert!(parsing_error_text("bimodal:NaN:5").contains("fraction NaN"));
        assert!(parsing_error_text("trimodal:0.7:5:0.7:9").contains("add up to 1.4"));
        assert!(
            parsing_error_text("exponential").contains("did you mean exp?"),
            "{}",
            parsing_error_text("exponential")
        );
        assert!(parsing_error_text("lognormal:-1").contains("SIGMA above 0"));
    }

    #[test]
    fn samples_have_the_configured_mean_and_class_shares() {
        for name in ["fixed", "exp", "lognormal:0.5", "bimodal:0.1:5", "trimodal:0.2:5:0.1:10"] {
            let service: ServiceTimeDistribution = name.parse().unwrap();
            let (sampler, mut rng) = (service.build_sampler(), seeded_rng(1, 0));
            let (count, mut sum, mut classes) = (200_000, 0.0, [0; 3]);
            for _ in 0..count {
                let (class, time) = sampler.sample_class_and_time(&mut rng);
                sum += ticks_to_time_units(time);
                classes[usize::from(class)] += 1;
            }
            // The standard deviations are at most 2.8, so the mean of 200,000 draws is accurate to about 0.02.
            let mean = sum / f64::from(count);
            assert!((mean - service.mean()).abs() < 0.025, "{name}: {mean} against {}", service.mean());
            if name.starts_with("tri") {
                assert!(
                    (39_000..41_000).contains(&classes[1]) && (19_300..20_700).contains(&classes[2]),
                    "{classes:?}"
                );
            }
        }
    }
}
