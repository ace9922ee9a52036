//! The methods of the comparison: a consistency and the policy that chooses where new connections go.

use coreward_model::consistency::Consistency;

/// Method by which packets find their servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Method {
    /// For the command line and the series of the figure.
    pub name: &'static str,
    /// Consistency in the controller's file.
    pub consistency: Consistency,
    /// Policy in the controller's file.
    pub policy: &'static str,
}

/// Compared methods. The paper has AWRR under Cheetah; a hash table is as good as what it falls back on, and the best
/// that others use is a consistent hash (Maglev, NSDI'16, Sect. 3.3).
pub const METHODS: [Method; 6] = [
    Method { name: "stateless", consistency: Consistency::Stateless, policy: "awrr" },
    Method { name: "stateful", consistency: Consistency::Stateful, policy: "awrr" },
    Method { name: "hash", consistency: Consistency::None, policy: "hash" },
    Method { name: "consistent-hash", consistency: Consistency::None, policy: "consistent-hash" },
    Method { name: "beamer", consistency: Consistency::Beamer, policy: "hash" },
    Method { name: "hash-table", consistency: Consistency::HashTable, policy: "consistent-hash" },
];

impl Method {
    /// The method of that name. Fails when there is none; names those that are.
    pub fn parse(name: &str) -> Result<Self, String> {
        let names = || METHODS.map(|method| method.name).join(", ");
        let found = METHODS.into_iter().find(|method| method.name == name);
        found.ok_or_else(|| format!("no method {name:?}: expected one of {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_others_are_rejected() {
        for method in METHODS {
            assert_eq!(Method::parse(method.name), Ok(method));
        }
        let error = Method::parse("maglev").unwrap_err();
        assert!(error.contains("\"maglev\"") && error.contains("consistent-hash"), "{error}");
    }
}
