//! Methods that are compared, each of which has a consistency mode and a policy that places new connections.

use coreward_model::consistency::ConsistencyMode;

/// Method that assigns packets to servers. It combines a connection consistency mode with a load-balancing policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PccMethod {
    /// Name of the method on the command line, and label of its series in the figure.
    pub name: &'static str,
    /// Value of `consistency` in the controller's file.
    pub consistency: ConsistencyMode,
    /// Value of `policy` in the controller's file.
    pub policy: &'static str,
}

/// Methods to compare. The Cheetah paper (NSDI'20) combines Cheetah with the policy AWRR. A connection table is only as
/// good as its fallback, and the best fallback in other systems is a consistent hash (Maglev, NSDI'16, Sect. 3.3).
pub const COMPARED_METHODS: [PccMethod; 6] = [
    PccMethod { name: "stateless", consistency: ConsistencyMode::Stateless, policy: "awrr" },
    PccMethod { name: "stateful", consistency: ConsistencyMode::Stateful, policy: "awrr" },
    PccMethod { name: "hash", consistency: ConsistencyMode::None, policy: "hash" },
    PccMethod { name: "consistent-hash", consistency: ConsistencyMode::None, policy: "consistent-hash" },
    PccMethod { name: "beamer", consistency: ConsistencyMode::Beamer, policy: "hash" },
    PccMethod { name: "hash-table", consistency: ConsistencyMode::HashTable, policy: "consistent-hash" },
];

impl PccMethod {
    /// Returns the method with this name. Fails with the list of known names when it does not exist.
    pub fn parse(name: &str) -> Result<Self, String> {
        let join_method_names = || COMPARED_METHODS.map(|method| method.name).join(", ");
        let found_method = COMPARED_METHODS.into_iter().find(|method| method.name == name);
        found_method.ok_or_else(|| format!("no method {name:?}: expected one of {}", join_method_names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn method_names_are_parsed_and_others_are_rejected() {
        for method in COMPARED_METHODS {
            assert_eq!(PccMethod::parse(method.name), Ok(method));
        }
        let error = PccMethod::parse("maglev").unwrap_err();
        assert!(error.contains("\"maglev\"") && error.contains("consistent-hash"), "{error}");
    }
}
