//! Classification of datagrams by service.

/// Bytes at an offset of the payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    pub offset: usize,
    pub bytes: Vec<u8>,
}

impl Pattern {
    /// Returns whether the payload has the bytes.
    #[inline]
    pub fn matches(&self, payload: &[u8]) -> bool {
        payload.get(self.offset..).is_some_and(|rest| rest.starts_with(&self.bytes))
    }
}

/// Rules for requests at one address and port, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Classifier {
    /// Services with their patterns; `None` matches every request.
    pub rules: Vec<(u8, Option<Pattern>)>,
}

impl Classifier {
    #[inline]
    pub fn classify_request(&self, payload: &[u8]) -> Option<u8> {
        let matches = |pattern: &Option<Pattern>| pattern.as_ref().is_none_or(|pattern| pattern.matches(payload));
        self.rules.iter().find(|(_, pattern)| matches(pattern)).map(|(service, _)| *service)
    }
}
