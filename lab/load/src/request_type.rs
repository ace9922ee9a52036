//! Request types and their expected service times.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Type of a request, which is the first byte of every request and response.
///
/// | byte | name | request for |
/// |---|---|---|
/// | 1 | `GET` | the value of a key |
/// | 2 | `PUT` | storing a new value for a key |
/// | 16 to 31 | `WORK0` to `WORK15` | service time without data, by class (for synthetic distributions) |
/// | 129 to 255 | `SCAN1` to `SCAN127` | this many key-value pairs in key order, from a given key on |
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestType(u8);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestTypeError {
    #[error("request type {0}: expected 1 (GET), 2 (PUT), 16 to 31 (WORK) or 129 to 255 (SCAN)")]
    UnknownByte(u8),
    #[error("request type {0:?}: expected GET, PUT, SCAN1 to SCAN127 or WORK0 to WORK15")]
    UnknownName(String),
}

const FIRST_WORK_TYPE_BYTE: u8 = 16;
/// Maximum number of key-value pairs that a SCAN can request.
pub const MAX_SCAN_PAIRS: u8 = 127;
const SCAN_TYPE_BYTE_OFFSET: u8 = 128;
/// Number of different WORK request types (see [`RequestType::with_work_class`]).
pub const WORK_CLASS_COUNT: u8 = 16;

impl RequestType {
    /// Request for the value of a key.
    pub const GET: Self = Self(1);
    /// Request to store a value for a key.
    pub const PUT: Self = Self(2);

    /// Returns the type of a SCAN that requests `pairs` key-value pairs. Returns `None` unless `pairs` is 1 to
    /// [`MAX_SCAN_PAIRS`].
    pub const fn with_scan_pair_count(pairs: u8) -> Option<Self> {
        if pairs >= 1 && pairs <= MAX_SCAN_PAIRS { Some(Self(SCAN_TYPE_BYTE_OFFSET + pairs)) } else { None }
    }

    /// Returns the type of requests that have no data and only take service time, for a class below
    /// [`WORK_CLASS_COUNT`]. Returns `None` for other classes.
    pub const fn with_work_class(class: u8) -> Option<Self> {
        if class < WORK_CLASS_COUNT { Some(Self(FIRST_WORK_TYPE_BYTE + class)) } else { None }
    }

    /// Returns the number of key-value pairs that a SCAN requests, or `None` for other types.
    pub const fn scan_pair_count(self) -> Option<u8> {
        if self.0 > SCAN_TYPE_BYTE_OFFSET { Some(self.0 - SCAN_TYPE_BYTE_OFFSET) } else { None }
    }

    /// Returns the class of a WORK type, or `None` for other types.
    pub const fn work_class(self) -> Option<u8> {
        if self.0 >= FIRST_WORK_TYPE_BYTE && self.0 < FIRST_WORK_TYPE_BYTE + WORK_CLASS_COUNT {
            Some(self.0 - FIRST_WORK_TYPE_BYTE)
        } else {
            None
        }
    }

    pub const fn as_byte(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for RequestType {
    type Error = RequestTypeError;

    fn try_from(byte: u8) -> Result<Self, RequestTypeError> {
        let request_type = Self(byte);
        let is_known = request_type == Self::GET
            || request_type == Self::PUT
            || request_type.scan_pair_count().is_some()
            || request_type.work_class().is_some();
        if is_known { Ok(request_type) } else { Err(RequestTypeError::UnknownByte(byte)) }
    }
}

impl FromStr for RequestType {
    type Err = RequestTypeError;

    fn from_str(name: &str) -> Result<Self, RequestTypeError> {
        let parse_number_after = |prefix: &str| name.strip_prefix(prefix).and_then(|number| number.parse().ok());
        let request_type = match name {
            "GET" => Some(Self::GET),
            "PUT" => Some(Self::PUT),
            _ => parse_number_after("SCAN")
                .and_then(Self::with_scan_pair_count)
                .or_else(|| parse_number_after("WORK").and_then(Self::with_work_class)),
        };
        request_type.ok_or_else(|| RequestTypeError::UnknownName(name.to_owned()))
    }
}

impl fmt::Display for RequestType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (*self, self.scan_pair_count(), self.work_class()) {
            (Self::GET, ..) => f.pad("GET"),
            (_, Some(pairs), _) => f.pad(&format!("SCAN{pairs}")),
            (_, _, Some(class)) => f.pad(&format!("WORK{class}")),
            _ => f.pad("PUT"),
        }
    }
}

impl Serialize for RequestType {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RequestType {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

const fn scan_request_type(pairs: u8) -> RequestType {
    RequestType::with_scan_pair_count(pairs).expect("1 to 127")
}

/// Average service time of each query type (ns), as Turbo measured it for the key-value store Masstree (Seyedroudbari
/// et al., HPCA 2023, caption of Figure 7).
pub const TURBO_SERVICE_TIMES_NS: [(RequestType, u32); 5] = [
    (RequestType::GET, 975),
    (RequestType::PUT, 1_350),
    (scan_request_type(18), 4_700),
    (scan_request_type(46), 9_180),
    (scan_request_type(105), 17_700),
];

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ServiceTimesError {
    #[error("service time {0:?}: expected TYPE=MICROSECONDS, as in GET=200,SCAN46=2000")]
    MissingTime(String),
    #[error(transparent)]
    InvalidRequestType(#[from] RequestTypeError),
    #[error("service time of {request_type}: {given:?}: expected microseconds, from 0 to 4294967")]
    InvalidTime { request_type: RequestType, given: String },
    #[error("multiplier {0}: expected a number above 0, at most 100000")]
    InvalidMultiplier(f64),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceTimesByType(BTreeMap<RequestType, u32>);

impl ServiceTimesByType {
    /// Returns [`TURBO_SERVICE_TIMES_NS`] times `multiplier`. A large multiplier suits machines whose network takes
    /// longer than the paper's requests. Fails unless the multiplier is above 0 and at most 100,000.
    pub fn scaled_turbo_times(multiplier: f64) -> Result<Self, ServiceTimesError> {
        if !(multiplier > 0.0 && multiplier <= 100_000.0) {
            return Err(ServiceTimesError::InvalidMultiplier(multiplier));
        }
        let service_times_ns =
            TURBO_SERVICE_TIMES_NS.map(|(request_type, ns)| (request_type, (f64::from(ns) * multiplier) as u32));
        Ok(Self(service_times_ns.into()))
    }

    /// Returns these service times, except that the times in `overrides` replace those of the same types.
    pub fn with_overrides(mut self, overrides: &Self) -> Self {
        self.0.extend(&overrides.0);
        self
    }

    /// Returns the service time of a request type, or `None` when it is not in the table.
    pub fn get(&self, request_type: RequestType) -> Option<Duration> {
        self.0.get(&request_type).map(|ns| Duration::from_nanos((*ns).into()))
    }

    /// Returns the service time of a request type (ns), or `None` when it is not in the table.
    pub fn get_ns(&self, request_type: RequestType) -> Option<u32> {
        self.0.get(&request_type).copied()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for ServiceTimesByType {
    type Err = ServiceTimesError;

    /// Parses service times in microseconds by request type, as in `GET=200,SCAN46=2000`.
    fn from_str(text: &str) -> Result<Self, ServiceTimesError> {
        let mut service_times_ns = BTreeMap::new();
        for type_and_time in text.split(',') {
            let (name, time) = type_and_time
                .split_once('=')
                .ok_or_else(|| ServiceTimesError::MissingTime(type_and_time.to_owned()))?;
            let request_type: RequestType = name.parse()?;
            let build_time_error = || ServiceTimesError::InvalidTime { request_type, given: time.to_owned() };
            let microseconds: f64 = time.parse().map_err(|_| build_time_error())?;
            let nanoseconds = microseconds * 1e3;
            if !(0.0..=f64::from(u32::MAX)).contains(&nanoseconds) {
                return Err(build_time_error());
            }
            service_times_ns.insert(request_type, nanoseconds as u32);
        }
        Ok(Self(service_times_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_a_request_type_with_a_name_or_rejected() {
        let mut known_type_count = 0;
        for byte in 0..=u8::MAX {
            if let Ok(request_type) = RequestType::try_from(byte) {
                known_type_count += 1;
                assert_eq!(request_type.as_byte(), byte);
                assert_eq!(request_type.to_string().parse(), Ok(request_type));
            }
        }
        assert_eq!(known_type_count, 2 + usize::from(WORK_CLASS_COUNT) + usize::from(MAX_SCAN_PAIRS));
        assert_eq!("SCAN46".parse::<RequestType>().unwrap().as_byte(), 174);
        for invalid_name in ["SCAN0", "SCAN128", "WORK16", "get", "", "SCAN"] {
            assert_eq!(
                invalid_name.parse::<RequestType>(),
                Err(RequestTypeError::UnknownName(invalid_name.to_owned()))
            );
        }
    }

    #[test]
    fn service_times_are_parsed_multiplied_and_overridden() {
        let turbo_times = ServiceTimesByType::scaled_turbo_times(200.0).unwrap();
        assert_eq!(turbo_times.get(RequestType::GET), Some(Duration::from_micros(195)));
        assert_eq!(turbo_times.get(scan_request_type(105)), Some(Duration::from_micros(3540)));
        assert_eq!(turbo_times.get(scan_request_type(106)), None);
        let overriding_times: ServiceTimesByType = "GET=0.5,WORK3=20".parse().unwrap();
        let combined_times = turbo_times.with_overrides(&overriding_times);
        assert_eq!(
            [combined_times.get_ns(RequestType::GET), combined_times.get_ns(RequestType::PUT)],
            [Some(500), Some(270_000)]
        );
        assert_eq!(combined_times.get_ns(RequestType::with_work_class(3).unwrap()), Some(20_000));
    }

    #[test]
    fn invalid_service_times_are_rejected_with_their_reason() {
        let expect_parse_error = |text: &str| text.parse::<ServiceTimesByType>().unwrap_err().to_string();
        assert!(expect_parse_error("GET").contains("\"GET\": expected TYPE=MICROSECONDS"));
        assert!(expect_parse_error("GOT=1").contains("\"GOT\": expected GET, PUT"));
        assert!(expect_parse_error("PUT=-1").contains("service time of PUT: \"-1\": expected microseconds"));
        assert!(expect_parse_error("PUT=NaN").contains("NaN"));
        assert!(ServiceTimesByType::scaled_turbo_times(f64::NAN).unwrap_err().to_string().contains("multiplier NaN"));
    }
}
