//! Load-balancing methods, and the names by which they are selected.

use std::fmt;
use std::str::FromStr;

use coreward_model::policy;

use crate::unknown_name::UnknownName;

/// Method by which load balancers find the server for a packet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BalancingMethod {
    /// Table of buckets that depends only on the servers in the pool (`hash`, `consistent-hash` or `maglev`).
    Hashed(HashBucketLayout),
    /// Stable hashing with daisy chaining (`beamer[:THRESHOLD]`). A server whose load exceeds (1 + threshold) x the
    /// mean receives no new connections until its load is below the mean.
    Beamer {
        /// Allowed excess over the servers' mean load (0.1 is 10 % above the mean), or `None` if unlimited.
        threshold: Option<f64>,
    },
    /// Connection table in each load balancer, in front of a table of buckets (`stateful-hash[:LAYOUT]`).
    Stateful(HashBucketLayout),
    /// Cookie with a tag for one of the recent pool configurations, by which the connection's packets are hashed
    /// (`history-tag[-kept]:BITS[:LAYOUT]`).
    HistoryTag {
        /// Number of bits in the tag, from 0 to [`MAX_HISTORY_TAG_BITS`].
        tag_bits: u8,
        /// Whether an open connection receives a newer tag when that tag also leads to its server.
        renews_tags: bool,
        layout: HashBucketLayout,
    },
    /// Cookie with the index of one of several hash functions (`hash-index:BITS[+TAG_BITS][:LAYOUT]`). When the
    /// connection began, this function led to the least loaded server.
    HashIndex {
        /// Number of bits in the index, from 0 to [`MAX_HASH_INDEX_BITS`].
        index_bits: u8,
        /// Number of bits in an additional tag, as in `history-tag`, from 0 to [`MAX_HISTORY_TAG_BITS`].
        tag_bits: u8,
        layout: HashBucketLayout,
    },
    /// Cookie with the id of the connection's server, which a policy of the load balancer has chosen
    /// (`cheetah:POLICY`).
    Cheetah {
        /// Name of the policy, one of [`policy::policy_names`].
        policy: &'static str,
    },
}

/// Maximum number of bits in a cookie's history tag. Tag and hash index together must fit into the cookie's 16 bits.
pub const MAX_HISTORY_TAG_BITS: u8 = 12;
/// Maximum number of bits in a cookie's hash index, which allows 16 hash functions.
pub const MAX_HASH_INDEX_BITS: u8 = 4;

/// Rule by which a table assigns its buckets to servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashBucketLayout {
    /// Bucket i belongs to server i modulo the number of servers (`hash`).
    Striped,
    /// Each bucket belongs to the server of the next point on a ring (`consistent-hash`).
    Ring,
    /// The servers take turns to claim buckets, and each bucket belongs to the first server that claims it (`maglev`).
    Maglev,
}

const HASH_LAYOUTS: [HashBucketLayout; 3] =
    [HashBucketLayout::Striped, HashBucketLayout::Ring, HashBucketLayout::Maglev];

impl HashBucketLayout {
    fn name(self) -> &'static str {
        match self {
            HashBucketLayout::Striped => "hash",
            HashBucketLayout::Ring => "consistent-hash",
            HashBucketLayout::Maglev => "maglev",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        HASH_LAYOUTS.into_iter().find(|layout| layout.name() == name)
    }

    fn parse_name(name: &str) -> Result<Self, UnknownName> {
        Self::from_name(name).ok_or_else(|| UnknownName::new("layout", name, HASH_LAYOUTS.map(HashBucketLayout::name)))
    }

    /// Returns the layout as the last parameter in a method's name, or an empty text for the default, `hash`.
    fn method_name_suffix(self) -> String {
        if self == HashBucketLayout::Striped { String::new() } else { format!(":{}", self.name()) }
    }
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BalancingMethodError {
    /// No method, layout or policy has the requested name.
    #[error(transparent)]
    UnknownName(#[from] UnknownName),
    /// The method `cheetah` has no policy.
    #[error(
        "method \"cheetah\": expected cheetah:POLICY with a policy out of {list}",
        list = policy::policy_names().join(", ")
    )]
    MissingPolicy,
    /// The parameter of `beamer` is not a threshold.
    #[error("method \"beamer:{0}\": expected a threshold above 0, at most 100, as 0.1 for 10 % above the mean")]
    InvalidThreshold(String),
    /// The parameter of a method with small cookies is not a valid number of bits.
    #[error(
        "method {0:?}: expected {name}:BITS with BITS from 0 to {max}, then, if not hash, :LAYOUT",
        name = .0.split(':').next().unwrap_or_default(),
        max = if .0.starts_with(HASH_INDEX_NAME) { "4, +TAG_BITS from 0 to 12 optionally" } else { "12" }
    )]
    InvalidBitCount(String),
    /// A method that takes no parameter has one.
    #[error("method {0:?}: it takes no parameter")]
    UnexpectedParameter(String),
}

/// Syntax of all methods with their parameters.
const BALANCING_METHOD_SYNTAX: [&str; 11] = [
    "hash",
    "consistent-hash",
    "maglev",
    "beamer",
    "beamer:THRESHOLD",
    "stateful-hash",
    "stateful-hash:LAYOUT",
    "history-tag:BITS[:LAYOUT]",
    "history-tag-kept:BITS[:LAYOUT]",
    "hash-index:BITS[+TAG_BITS][:LAYOUT]",
    "cheetah:POLICY",
];

const HISTORY_TAG_NAME: &str = "history-tag";
const HISTORY_TAG_KEPT_NAME: &str = "history-tag-kept";
const HASH_INDEX_NAME: &str = "hash-index";

/// Splits `BITS[:LAYOUT]` into the text before the colon and the layout.
fn parse_bits_and_layout(parameter: &str) -> Result<(&str, HashBucketLayout), BalancingMethodError> {
    match parameter.split_once(':') {
        None => Ok((parameter, HashBucketLayout::Striped)),
        Some((bits, layout)) => Ok((bits, HashBucketLayout::parse_name(layout)?)),
    }
}

fn parse_bit_count(max_bits: u8, text: &str) -> Option<u8> {
    text.parse().ok().filter(|bits| *bits <= max_bits)
}

impl FromStr for BalancingMethod {
    type Err = BalancingMethodError;

    fn from_str(method_text: &str) -> Result<Self, BalancingMethodError> {
        let (name, parameter) = method_text
            .split_once(':')
            .map_or((method_text, None), |(name, parameter_text)| (name, Some(parameter_text)));
        match (name, parameter) {
            ("beamer", None) => Ok(BalancingMethod::Beamer { threshold: None }),
            ("beamer", Some(text)) => {
                let threshold = text.parse().ok().filter(|threshold: &f64| *threshold > 0.0 && *threshold <= 100.0);
                let threshold = threshold.ok_or_else(|| BalancingMethodError::InvalidThreshold(text.to_owned()))?;
                Ok(BalancingMethod::Beamer { threshold: Some(threshold) })
            }
            ("stateful-hash", None) => Ok(BalancingMethod::Stateful(HashBucketLayout::Striped)),
            ("stateful-hash", Some(layout)) => Ok(BalancingMethod::Stateful(HashBucketLayout::parse_name(layout)?)),
            (HISTORY_TAG_NAME | HISTORY_TAG_KEPT_NAME, parameter) => {
                let (bits, layout) = parse_bits_and_layout(parameter.unwrap_or_default())?;
                let bits = parse_bit_count(MAX_HISTORY_TAG_BITS, bits)
                    .ok_or_else(|| BalancingMethodError::InvalidBitCount(method_text.to_owned()))?;
                Ok(BalancingMethod::HistoryTag { tag_bits: bits, renews_tags: name == HISTORY_TAG_NAME, layout })
            }
            (HASH_INDEX_NAME, parameter) => {
                let (bits, layout) = parse_bits_and_layout(parameter.unwrap_or_default())?;
                let (bits, tag_bits) = bits.split_once('+').unwrap_or((bits, "0"));
                let parsed_bits =
                    parse_bit_count(MAX_HASH_INDEX_BITS, bits).zip(parse_bit_count(MAX_HISTORY_TAG_BITS, tag_bits));
                let (bits, tag_bits) =
                    parsed_bits.ok_or_else(|| BalancingMethodError::InvalidBitCount(method_text.to_owned()))?;
                Ok(BalancingMethod::HashIndex { index_bits: bits, tag_bits, layout })
            }
            ("cheetah", None) => Err(BalancingMethodError::MissingPolicy),
            ("cheetah", Some(requested_policy)) => {
                let known_policy = policy::policy_names().into_iter().find(|name| *name == requested_policy);
                let policy =
                    known_policy.ok_or_else(|| UnknownName::new("policy", requested_policy, policy::policy_names()))?;
                Ok(BalancingMethod::Cheetah { policy })
            }
            (name, parameter) => match (HashBucketLayout::from_name(name), parameter) {
                (Some(layout), None) => Ok(BalancingMethod::Hashed(layout)),
                (Some(_), Some(_)) => Err(BalancingMethodError::UnexpectedParameter(method_text.to_owned())),
                (None, _) => Err(UnknownName::new("method", method_text, BALANCING_METHOD_SYNTAX).into()),
            },
        }
    }
}

impl fmt::Display for BalancingMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BalancingMethod::Hashed(layout) => f.write_str(layout.name()),
            BalancingMethod::Beamer { threshold: None } => f.write_str("beamer"),
            BalancingMethod::Beamer { threshold: Some(threshold) } => write!(f, "beamer:{threshold}"),
            BalancingMethod::Stateful(layout) => write!(f, "stateful-hash{}", layout.method_name_suffix()),
            BalancingMethod::HistoryTag { tag_bits: bits, renews_tags, layout } => {
                let name = if *renews_tags { HISTORY_TAG_NAME } else { HISTORY_TAG_KEPT_NAME };
                write!(f, "{name}:{bits}{}", layout.method_name_suffix())
            }
            BalancingMethod::HashIndex { index_bits: bits, tag_bits: 0, layout } => {
                write!(f, "{HASH_INDEX_NAME}:{bits}{}", layout.method_name_suffix())
            }
            BalancingMethod::HashIndex { index_bits: bits, tag_bits, layout } => {
                write!(f, "{HASH_INDEX_NAME}:{bits}+{tag_bits}{}", layout.method_name_suffix())
            }
            BalancingMethod::Cheetah { policy } => write!(f, "cheetah:{policy}"),
        }
    }
}

impl serde::Serialize for BalancingMethod {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn method_names_round_trip() {
        let names = [
            "hash",
            "consistent-hash",
            "maglev",
            "beamer",
            "beamer:0.1",
            "stateful-hash",
            "stateful-hash:maglev",
            "history-tag:3",
            "history-tag-kept:12:maglev",
            "hash-index:1",
            "hash-index:2+4:consistent-hash",
        ];
        let cheetah_methods = policy::policy_names().into_iter().map(|name| format!("cheetah:{name}"));
        for name in names.map(String::from).into_iter().chain(cheetah_methods) {
            assert_eq!(name.parse::<BalancingMethod>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn unknown_method_is_rejected() {
        for (method_text, expected) in [
            ("beemer", "method \"beemer\" does not exist: did you mean beamer? expected one of hash"),
            ("cheeta:rr", "method \"cheeta:rr\" does not exist: did you mean cheetah:POLICY?"),
            ("cheetah", "expected cheetah:POLICY with a policy out of hash, consistent-hash"),
            ("cheetah:crosrss", "policy \"crosrss\" does not exist: did you mean crossrss or crossrss-plus?"),
            ("stateful-hash:ring", "layout \"ring\" does not exist: expected one of hash, consistent-hash, maglev"),
            ("beamer:-1", "method \"beamer:-1\": expected a threshold above 0"),
            ("beamer:nan", "expected a threshold above 0"),
            ("history-tag", "method \"history-tag\": expected history-tag:BITS with BITS from 0 to 12"),
            ("history-tag:13", "expected history-tag:BITS with BITS from 0 to 12"),
            ("history-tag:3:ring", "layout \"ring\" does not exist"),
            ("hash-index:5", "expected hash-index:BITS with BITS from 0 to 4, +TAG_BITS from 0 to 12"),
            ("hash-index:1+13", "expected hash-index:BITS"),
            ("maglev:3", "method \"maglev:3\": it takes no parameter"),
        ] {
            let error = method_text.parse::<BalancingMethod>().unwrap_err().to_string();
            assert!(error.contains(expected), "{method_text}: {error}");
        }
    }
}
