//! Random requests, drawn from a mix of request types or from a distribution of service times.

use std::fmt;
use std::str::FromStr;

use coreward_model::rss::seeded_rng;
use coreward_sim::random::draw_uniform_below_one;
use coreward_sim::rpc::ticks::ticks_to_time_units;
use coreward_sim::rpc::{ServiceTimeDistribution, ServiceTimeError, ServiceTimeSampler};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::request_type::{RequestType, RequestTypeError, ServiceTimesByType, WORK_CLASS_COUNT};

/// Class, type and service time of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestParameters {
    /// Index of the request's type in [`RequestWorkload::request_types`].
    pub class_index: u8,
    pub request_type: RequestType,
    /// Service time that the request asks for (ns), or 0 if the server chooses it.
    pub service_ns: u32,
}

/// Mix of request types with the share of each, written as `GET=0.5,PUT=0.5` or as a preset's name.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestMix(Vec<(RequestType, f64)>);

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestMixError {
    #[error("mix {0:?}: expected TYPE=SHARE,..., as in GET=0.9,SCAN46=0.1, or turbo-7a, turbo-7b, turbo-7c, turbo-7d")]
    UnknownMix(String),
    #[error(transparent)]
    InvalidRequestType(#[from] RequestTypeError),
    #[error("mix: {0} is there twice")]
    DuplicateType(RequestType),
    #[error("share of {request_type}: {given:?}: expected a number above 0, at most 1")]
    InvalidShare { request_type: RequestType, given: String },
    #[error("the shares of the mix add up to {0}: expected 1")]
    WrongShareSum(f64),
    #[error("mix of {0} types: expected at most 16")]
    TooManyTypes(usize),
}

/// Query mixes of Turbo's Figure 7 (Seyedroudbari et al., HPCA 2023, Sect. VII-C). Mix (a) is YCSB-A, which is half GET
/// and half PUT. The paper gives no shares for the other mixes. Mixes (b) and (c) "roughly match" the bimodal
/// distributions in its Sect. VII-A. In one, 10 % of requests take five times as long as the others, and in the other,
/// 40 % take ten times as long. Mix (d) is trimodal with a mean of 9.2 us, so it has a third each of GET, SCAN46 and
/// SCAN105. The scenarios turbo-7a to turbo-7d simulate the same mixes.
const REQUEST_MIX_PRESETS: [(&str, &str); 4] = [
    ("turbo-7a", "GET=0.5,PUT=0.5"),
    ("turbo-7b", "GET=0.9,SCAN18=0.1"),
    ("turbo-7c", "GET=0.6,SCAN46=0.4"),
    ("turbo-7d", "GET=0.34,SCAN46=0.33,SCAN105=0.33"),
];

const MAX_REQUEST_CLASSES: usize = 16;

impl FromStr for RequestMix {
    type Err = RequestMixError;

    fn from_str(input: &str) -> Result<Self, RequestMixError> {
        let preset = REQUEST_MIX_PRESETS.iter().find(|(name, _)| *name == input);
        let mix_text = preset.map_or(input, |(_, text)| text);
        let mut type_shares = Vec::new();
        for type_and_share in mix_text.split(',') {
            let (name, share) =
                type_and_share.split_once('=').ok_or_else(|| RequestMixError::UnknownMix(input.to_owned()))?;
            let request_type: RequestType = name.parse()?;
            if type_shares.iter().any(|(listed_type, _)| *listed_type == request_type) {
                return Err(RequestMixError::DuplicateType(request_type));
            }
            let share_number = share.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
            let share_number =
                share_number.ok_or_else(|| RequestMixError::InvalidShare { request_type, given: share.to_owned() })?;
            type_shares.push((request_type, share_number));
        }
        let sum_of_shares: f64 = type_shares.iter().map(|(_, share)| share).sum();
        if (sum_of_shares - 1.0).abs() > 1e-6 {
            return Err(RequestMixError::WrongShareSum(sum_of_shares));
        }
        if type_shares.len() > MAX_REQUEST_CLASSES {
            return Err(RequestMixError::TooManyTypes(type_shares.len()));
        }
        Ok(Self(type_shares))
    }
}

impl RequestMix {
    /// Returns the mix's request types with their shares, which add up to 1.
    pub fn shares(&self) -> &[(RequestType, f64)] {
        &self.0
    }

    /// Returns the shortest service time of the mix's types (us), from
    /// [`TURBO_SERVICE_TIMES_NS`](crate::request_type::TURBO_SERVICE_TIMES_NS). Returns `None` if that table lacks a
    /// type.
    pub fn shortest_turbo_service_us(&self) -> Option<f64> {
        let turbo_times = ServiceTimesByType::scaled_turbo_times(1.0).ok()?;
        let times: Option<Vec<u32>> =
            self.0.iter().map(|(request_type, _)| turbo_times.get_ns(*request_type)).collect();
        times?.into_iter().min().map(|ns| f64::from(ns) / 1e3)
    }
}

impl fmt::Display for RequestMix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (request_type, share)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            write!(f, "{separator}{request_type}={share}")?;
        }
        Ok(())
    }
}

/// Distribution of service times, written like `exp:3` with a mean in microseconds, or as for `coreward-lab sim rpc`.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaledServiceTimeDistribution {
    distribution_in_units: ServiceTimeDistribution,
    /// Length of one unit of the distribution (us): the service time of its shortest class, or its mean if it has no
    /// classes.
    unit_us: f64,
}

/// RingLeader's synthetic workloads (Lin et al., NSDI 2023, Table 2). In Bimodal, 95 % of requests take 5 us and 5 %
/// take 100 us. In High Bimodal, 99 % take 3 us and 1 % take 100 us. The short requests have high priority. The
/// workload Exp(3) is written as `exp:3`.
const RINGLEADER_DISTRIBUTIONS: [(&str, &str, f64); 2] =
    [("ringleader-bimodal", "bimodal:0.05:20", 5.0), ("ringleader-high-bimodal", "bimodal:0.01:33.333333", 3.0)];

impl FromStr for ScaledServiceTimeDistribution {
    type Err = ServiceTimeError;

    fn from_str(input: &str) -> Result<Self, ServiceTimeError> {
        if let Some((_, text, unit_us)) = RINGLEADER_DISTRIBUTIONS.iter().find(|(name, ..)| *name == input) {
            return Ok(Self { distribution_in_units: text.parse()?, unit_us: *unit_us });
        }
        if let Some(mean) = input.strip_prefix("exp:") {
            let valid_mean = mean.parse().ok().filter(|mean| *mean > 0.0 && *mean <= 1e6);
            let expected_format = "exp:MICROSECONDS, above 0, at most 1000000";
            let unit_us = valid_mean.ok_or_else(|| ServiceTimeError::InvalidParameters {
                distribution_text: input.to_owned(),
                expected: expected_format,
            })?;
            return Ok(Self { distribution_in_units: ServiceTimeDistribution::Exponential, unit_us });
        }
        Ok(Self { distribution_in_units: input.parse()?, unit_us: 1.0 })
    }
}

impl fmt::Display for ScaledServiceTimeDistribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} us", self.distribution_in_units, self.unit_us)
    }
}

impl ScaledServiceTimeDistribution {
    /// Returns the mean service time without any multiplier (us).
    pub fn mean_service_us(&self) -> f64 {
        self.distribution_in_units.mean() * self.unit_us
    }
}

#[derive(Debug, Clone)]
enum RequestSampler {
    /// Request types, each with its cumulative share and requested service time (ns, or 0 if the server chooses it).
    Mix(Vec<(RequestType, f64, u32)>),
    /// Sampler of service times in a distribution's units, and the length of one unit (ns).
    ServiceTimeDistribution(ServiceTimeSampler, f64),
}

#[derive(Debug, Clone)]
pub struct RequestWorkload {
    sampler: RequestSampler,
    request_types: Vec<RequestType>,
    rng: Xoshiro256PlusPlus,
}

impl RequestWorkload {
    /// Creates a workload with the request types of `mix`. The server chooses the service times of types that are not
    /// in `service_times`.
    pub fn from_mix(mix: &RequestMix, service_times: &ServiceTimesByType, seed: u64, rng_stream: u64) -> Self {
        let mut cumulative_share = 0.0;
        let mut build_mix_entry = |(request_type, share): &(RequestType, f64)| {
            cumulative_share += share;
            (*request_type, cumulative_share, service_times.get_ns(*request_type).unwrap_or(0))
        };
        let mut mix_entries: Vec<_> = mix.0.iter().map(&mut build_mix_entry).collect();
        // The shares may add up to a little less than 1, so the last type takes the rest.
        mix_entries.last_mut().expect("a mix has a type").1 = f64::INFINITY;
        let request_types = mix.0.iter().map(|(request_type, _)| *request_type).collect();
        Self { sampler: RequestSampler::Mix(mix_entries), request_types, rng: seeded_rng(seed, rng_stream) }
    }

    /// Creates a workload whose service times follow a distribution, multiplied by `multiplier`. Each class of the
    /// distribution is a type of [`RequestType::with_work_class`].
    pub fn from_service_times(
        distribution: &ScaledServiceTimeDistribution,
        multiplier: f64,
        seed: u64,
        rng_stream: u64,
    ) -> Self {
        let unit_ns = distribution.unit_us * 1e3 * multiplier;
        let class_count = distribution.distribution_in_units.class_service_times().len().min(WORK_CLASS_COUNT.into());
        let request_types = (0..class_count as u8)
            .map(|class| RequestType::with_work_class(class).expect("below WORK_CLASS_COUNT"))
            .collect();
        Self {
            sampler: RequestSampler::ServiceTimeDistribution(
                distribution.distribution_in_units.build_sampler(),
                unit_ns,
            ),
            request_types,
            rng: seeded_rng(seed, rng_stream),
        }
    }

    /// Restricts the workload to its first request type. For a distribution, all requests then have the service time of
    /// its shortest class, or its mean if it has no classes. The measuring stream uses this, as Turbo's measuring
    /// client does (Sect. VII-A).
    pub fn with_first_type_only(mut self) -> Self {
        match &mut self.sampler {
            RequestSampler::Mix(entries) => {
                entries.truncate(1);
                entries[0].1 = f64::INFINITY;
            }
            RequestSampler::ServiceTimeDistribution(sampler, _) => {
                *sampler = ServiceTimeDistribution::Fixed.build_sampler()
            }
        }
        self.request_types.truncate(1);
        self
    }

    /// Returns the request types. If they come from a distribution, the first one has the shortest service time.
    pub fn request_types(&self) -> &[RequestType] {
        &self.request_types
    }

    pub fn next_request(&mut self) -> RequestParameters {
        match &self.sampler {
            RequestSampler::Mix(entries) => {
                let uniform_sample = draw_uniform_below_one(&mut self.rng);
                let class_index = entries
                    .iter()
                    .position(|(_, cumulative_share, _)| uniform_sample < *cumulative_share)
                    .expect("the last is infinite");
                let (request_type, _, service_ns) = entries[class_index];
                RequestParameters { class_index: class_index as u8, request_type, service_ns }
            }
            RequestSampler::ServiceTimeDistribution(sampler, unit_ns) => {
                let (class, service_ticks) = sampler.sample_class_and_time(&mut self.rng);
                // The minimum is 1, because 0 lets the server choose the time. `as` limits longer times to 4.3 s.
                let service_ns = ((ticks_to_time_units(service_ticks) * unit_ns) as u32).max(1);
                RequestParameters {
                    class_index: class,
                    request_type: self.request_types[usize::from(class)],
                    service_ns,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampled_mean_service_us(service: &str) -> f64 {
        let mut workload = RequestWorkload::from_service_times(&service.parse().unwrap(), 100.0, 1, 2);
        let request_count = 200_000;
        (0..request_count).map(|_| f64::from(workload.next_request().service_ns) / 1e5).sum::<f64>()
            / f64::from(request_count)
    }

    #[test]
    fn sampled_ringleader_service_times_have_the_published_means() {
        for (name, mean) in [("exp:3", 3.0), ("ringleader-bimodal", 9.75), ("ringleader-high-bimodal", 3.97)] {
            let sampled_mean = sampled_mean_service_us(name);
            // The tolerance is three standard errors, which are 0.05 us each for 200,000 draws.
            assert!((sampled_mean - mean).abs() < 0.15, "{name}: {sampled_mean} us");
            assert!((name.parse::<ScaledServiceTimeDistribution>().unwrap().mean_service_us() - mean).abs() < 1e-6);
        }
    }

    #[test]
    fn sampled_turbo_mixes_have_the_published_mean_service_times() {
        let turbo_times = ServiceTimesByType::scaled_turbo_times(1.0).unwrap();
        for (name, mean_us) in [("turbo-7a", 1.1625), ("turbo-7b", 1.3475), ("turbo-7c", 4.257), ("turbo-7d", 9.2019)] {
            let mut workload = RequestWorkload::from_mix(&name.parse().unwrap(), &turbo_times, 3, 4);
            let request_count = 100_000;
            let sum_us: f64 = (0..request_count).map(|_| f64::from(workload.next_request().service_ns) / 1e3).sum();
            assert!(
                (sum_us / f64::from(request_count) / mean_us - 1.0).abs() < 0.02,
                "{name}: {}",
                sum_us / f64::from(request_count)
            );
        }
    }

    #[test]
    fn classes_of_a_service_time_distribution_are_separate_request_types() {
        let workload = RequestWorkload::from_service_times(&"trimodal:0.1:5:0.01:50".parse().unwrap(), 1.0, 1, 1);
        let names: Vec<String> = workload.request_types().iter().map(RequestType::to_string).collect();
        assert_eq!(names, ["WORK0", "WORK1", "WORK2"]);
    }

    #[test]
    fn invalid_mixes_and_distributions_are_rejected_with_their_reason() {
        let expect_mix_error = |text: &str| text.parse::<RequestMix>().unwrap_err().to_string();
        assert!(expect_mix_error("turbo-7e").contains("\"turbo-7e\": expected TYPE=SHARE"));
        assert!(expect_mix_error("GET=0.5").contains("add up to 0.5: expected 1"));
        assert!(expect_mix_error("GET=0.5,GET=0.5").contains("GET is there twice"));
        assert!(expect_mix_error("GET=NaN,PUT=1").contains("share of GET: \"NaN\""));
        assert!(expect_mix_error("SCAN0=1").contains("SCAN0"));
        let expect_distribution_error =
            |text: &str| text.parse::<ScaledServiceTimeDistribution>().unwrap_err().to_string();
        assert!(expect_distribution_error("exp:0").contains("expected exp:MICROSECONDS"));
        assert!(expect_distribution_error("bimodal:1.5:2").contains("fraction 1.5"));
    }

    proptest! {
        #[test]
        fn request_types_are_sampled_with_the_shares_of_the_mix(weights in prop::collection::vec(1u32..100, 1..6),
            seed in any::<u64>()) {
            let weight_sum: u32 = weights.iter().sum();
            let compute_share = |weight: &u32| f64::from(*weight) / f64::from(weight_sum);
            let format_mix_pair =
                |(index, weight): (usize, &u32)| format!("SCAN{}={}", index + 1, compute_share(weight));
            let mix_pairs: Vec<String> = weights.iter().enumerate().map(format_mix_pair).collect();
            let mix: RequestMix = mix_pairs.join(",").parse().unwrap();
            let mut workload = RequestWorkload::from_mix(&mix, &ServiceTimesByType::default(), seed, 1);
            let (count, mut drawn_counts) = (20_000, vec![0u32; weights.len()]);
            for _ in 0..count {
                let parameters = workload.next_request();
                drawn_counts[usize::from(parameters.class_index)] += 1;
                prop_assert_eq!(parameters.request_type, workload.request_types()[usize::from(parameters.class_index)]);
            }
            for (weight, drawn_count) in weights.iter().zip(&drawn_counts) {
                let (expected_share, drawn_share) = (compute_share(weight), f64::from(*drawn_count) / f64::from(count));
                // The tolerance is six standard deviations, which is exceeded once in 5e8 draws.
                let standard_deviation = (expected_share * (1.0 - expected_share) / f64::from(count)).sqrt();
                prop_assert!((drawn_share - expected_share).abs() <= 6.0 * standard_deviation, "{drawn_share} of \
                    {expected_share}");
            }
        }
    }
}
