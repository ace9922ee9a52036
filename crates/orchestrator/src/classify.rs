//! Assigns received datagrams to services.

/// Pattern that a payload matches if it has these bytes at this offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PayloadPattern {
    pub offset: usize,
    pub bytes: Vec<u8>,
}

impl PayloadPattern {
    #[inline]
    pub fn matches(&self, payload: &[u8]) -> bool {
        payload.get(self.offset..).is_some_and(|payload_tail| payload_tail.starts_with(&self.bytes))
    }
}

/// Ordered rules that assign the requests to one address and port to services. The first matching rule applies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Classifier {
    /// Rules, each with the number of a service and the pattern of its requests. A rule without a pattern matches every
    /// request.
    pub rules: Vec<(u8, Option<PayloadPattern>)>,
}

impl Classifier {
    #[inline]
    pub fn classify_request(&self, payload: &[u8]) -> Option<u8> {
        let rule_matches =
            |pattern: &Option<PayloadPattern>| pattern.as_ref().is_none_or(|pattern| pattern.matches(payload));
        self.rules.iter().find(|(_, pattern)| rule_matches(pattern)).map(|(service, _)| *service)
    }
}
