//! The names of the methods.

use std::fmt;
use std::str::FromStr;

use coreward_model::policy;

use crate::names::UnknownName;

/// How load balancers find the server of a packet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Method {
    /// By a table of buckets that depends on the pool only.
    Hashed(Layout),
    /// `beamer[:THRESHOLD]`: stable hashing with daisy chaining; a server whose load is above (1 + threshold) x the mean gets
    /// no new connections until it is below the mean.
    Beamer {
        /// The imbalance that is allowed.
        threshold: Option<f64>,
    },
    /// `stateful-hash[:LAYOUT]`: a connection table in each load balancer, in front of a table of buckets.
    Stateful(Layout),
    /// `cheetah:POLICY`: the cookie names the server, which a policy of the load balancer chose.
    Cheetah {
        /// A name out of [`policy::names`].
        policy: &'static str,
    },
}

/// How a table of buckets is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `hash`: bucket i goes to server i modulo their number.
    Striped,
    /// `consistent-hash`: to the next point on a ring.
    Ring,
    /// `maglev`: to the server that claimed it in its turn.
    Maglev,
}

/// All layouts.
const LAYOUTS: [Layout; 3] = [Layout::Striped, Layout::Ring, Layout::Maglev];

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Layout::Striped => "hash",
            Layout::Ring => "consistent-hash",
            Layout::Maglev => "maglev",
        }
    }

    fn named(name: &str) -> Option<Self> {
        LAYOUTS.into_iter().find(|layout| layout.name() == name)
    }
}

/// Text that is no method.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MethodError {
    /// No such method, layout or policy.
    #[error(transparent)]
    Unknown(#[from] UnknownName),
    /// `cheetah` alone.
    #[error("method \"cheetah\": expected cheetah:POLICY with a policy out of {list}", list = policy::names().join(", "))]
    NoPolicy,
    /// Not a threshold.
    #[error("method \"beamer:{0}\": expected a threshold above 0, at most 100, as 0.1 for 10 % above the mean")]
    Threshold(String),
    /// A parameter that the method does not have.
    #[error("method {0:?}: it takes no parameter")]
    Parameter(String),
}

/// Every method, with its parameters.
const FORMS: [&str; 8] = [
    "hash",
    "consistent-hash",
    "maglev",
    "beamer",
    "beamer:THRESHOLD",
    "stateful-hash",
    "stateful-hash:LAYOUT",
    "cheetah:POLICY",
];

impl FromStr for Method {
    type Err = MethodError;

    fn from_str(given: &str) -> Result<Self, MethodError> {
        let (name, parameter) = given.split_once(':').map_or((given, None), |(name, rest)| (name, Some(rest)));
        match (name, parameter) {
            ("beamer", None) => Ok(Method::Beamer { threshold: None }),
            ("beamer", Some(text)) => {
                let threshold = text.parse().ok().filter(|threshold: &f64| *threshold > 0.0 && *threshold <= 100.0);
                let threshold = threshold.ok_or_else(|| MethodError::Threshold(text.to_owned()))?;
                Ok(Method::Beamer { threshold: Some(threshold) })
            }
            ("stateful-hash", None) => Ok(Method::Stateful(Layout::Striped)),
            ("stateful-hash", Some(layout)) => {
                let unknown = || UnknownName::new("layout", layout, LAYOUTS.map(Layout::name));
                Ok(Method::Stateful(Layout::named(layout).ok_or_else(unknown)?))
            }
            ("cheetah", None) => Err(MethodError::NoPolicy),
            ("cheetah", Some(wanted)) => {
                let known = policy::names().into_iter().find(|name| *name == wanted);
                let policy = known.ok_or_else(|| UnknownName::new("policy", wanted, policy::names()))?;
                Ok(Method::Cheetah { policy })
            }
            (name, parameter) => match (Layout::named(name), parameter) {
                (Some(layout), None) => Ok(Method::Hashed(layout)),
                (Some(_), Some(_)) => Err(MethodError::Parameter(given.to_owned())),
                (None, _) => Err(UnknownName::new("method", given, FORMS).into()),
            },
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::Hashed(layout) => f.write_str(layout.name()),
            Method::Beamer { threshold: None } => f.write_str("beamer"),
            Method::Beamer { threshold: Some(threshold) } => write!(f, "beamer:{threshold}"),
            Method::Stateful(Layout::Striped) => f.write_str("stateful-hash"),
            Method::Stateful(layout) => write!(f, "stateful-hash:{}", layout.name()),
            Method::Cheetah { policy } => write!(f, "cheetah:{policy}"),
        }
    }
}

impl serde::Serialize for Method {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        let names =
            ["hash", "consistent-hash", "maglev", "beamer", "beamer:0.1", "stateful-hash", "stateful-hash:maglev"];
        let cheetah = policy::names().into_iter().map(|name| format!("cheetah:{name}"));
        for name in names.map(String::from).into_iter().chain(cheetah) {
            assert_eq!(name.parse::<Method>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn what_is_none_is_named() {
        for (given, expected) in [
            ("beemer", "method \"beemer\" does not exist: did you mean beamer? expected one of hash"),
            ("cheeta:rr", "method \"cheeta:rr\" does not exist: did you mean cheetah:POLICY?"),
            ("cheetah", "expected cheetah:POLICY with a policy out of hash, consistent-hash"),
            ("cheetah:crosrss", "policy \"crosrss\" does not exist: did you mean crossrss or crossrss-plus?"),
            ("stateful-hash:ring", "layout \"ring\" does not exist: expected one of hash, consistent-hash, maglev"),
            ("beamer:-1", "method \"beamer:-1\": expected a threshold above 0"),
            ("beamer:nan", "expected a threshold above 0"),
            ("maglev:3", "method \"maglev:3\": it takes no parameter"),
        ] {
            let error = given.parse::<Method>().unwrap_err().to_string();
            assert!(error.contains(expected), "{given}: {error}");
        }
    }
}
