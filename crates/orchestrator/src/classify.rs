//! Assigns received datagrams to services.

/// Pattern that matches every payload with these bytes at this offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PayloadPattern {
    pub byte_offset: usize,
    pub expected_bytes: Vec<u8>,
}

impl PayloadPattern {
    #[inline]
    pub fn matches(&self, payload: &[u8]) -> bool {
        payload.get(self.byte_offset..).is_some_and(|payload_tail| payload_tail.starts_with(&self.expected_bytes))
    }
}

/// Ordered rules that assign the requests to one address and port to services. The first matching rule applies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestClassifier {
    /// Rules, each with the number of a service and the pattern of its requests. A rule without a pattern matches every
    /// request.
    pub services_and_patterns: Vec<(u8, Option<PayloadPattern>)>,
}

impl RequestClassifier {
    #[inline]
    pub fn classify_request(&self, payload: &[u8]) -> Option<u8> {
        let rule_matches =
            |pattern: &Option<PayloadPattern>| pattern.as_ref().is_none_or(|pattern| pattern.matches(payload));
        self.services_and_patterns.iter().find(|(_, pattern)| rule_matches(pattern)).map(|(service, _)| *service)
    }
}
