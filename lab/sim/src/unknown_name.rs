//! Errors for unknown names, with a suggestion of the most similar known name.

/// Error for a name that does not exist, with a list of the existing names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{kind} {unknown_name:?} does not exist: {hint}expected one of {list}",
    hint = self.format_suggestions(),
    list = known_names.join(", ")
)]
pub struct UnknownName {
    /// Kind of the named items, for instance "policy" or "figure".
    pub kind: &'static str,
    pub unknown_name: String,
    pub known_names: Vec<String>,
}

/// Minimum Jaro-Winkler similarity (0 to 1) of a name to be suggested.
const MIN_NAME_SIMILARITY: f64 = 0.7;
const MAX_NAME_SUGGESTIONS: usize = 3;

impl UnknownName {
    pub fn new<N: Into<String>>(kind: &'static str, name: &str, known_names: impl IntoIterator<Item = N>) -> Self {
        Self { kind, unknown_name: name.to_owned(), known_names: known_names.into_iter().map(Into::into).collect() }
    }

    pub fn nearest_names(&self) -> Vec<&str> {
        let lowercase_name = self.unknown_name.to_lowercase();
        let mut similar_names: Vec<(f64, &str)> = self
            .known_names
            .iter()
            .map(|name| (strsim::jaro_winkler(&lowercase_name, &name.to_lowercase()), name.as_str()))
            .filter(|(similarity, _)| *similarity >= MIN_NAME_SIMILARITY)
            .collect();
        similar_names.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        similar_names.into_iter().take(MAX_NAME_SUGGESTIONS).map(|(_, name)| name).collect()
    }

    fn format_suggestions(&self) -> String {
        match self.nearest_names()[..] {
            [] => String::new(),
            ref nearest_names => format!("did you mean {}? ", nearest_names.join(" or ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_names_are_suggested() {
        let error = UnknownName::new("policy", "crosrss", ["hash", "rr", "crossrss", "crossrss-plus"]);
        assert_eq!(error.nearest_names(), ["crossrss", "crossrss-plus"]);
        assert_eq!(
            error.to_string(),
            "policy \"crosrss\" does not exist: did you mean crossrss or crossrss-plus? expected one of hash, rr, \
             crossrss, crossrss-plus"
        );
        assert_eq!(
            UnknownName::new("figure", "zzz", ["a", "b"]).to_string(),
            "figure \"zzz\" does not exist: expected one of a, b"
        );
    }
}
