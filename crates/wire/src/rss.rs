//! RSS configuration of a server's NIC, as its agent reports it.

use coreward_model::rss::{IndirectionTable, RssConfig, RssInputTransform, RssKey};

use crate::sanitize::sanitize_str;
use crate::{WireError, v1};

/// RSS configuration of a server's NIC, as its agent reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedRss {
    /// Source of the RSS configuration: "ethtool" or "testbed emulation".
    pub source: String,
    /// RSS key and indirection table, or `None` if the NIC does not reveal them.
    pub rss: Option<RssConfig>,
}

impl From<&ReportedRss> for v1::Rss {
    fn from(reported_rss: &ReportedRss) -> Self {
        let source = reported_rss.source.clone();
        match &reported_rss.rss {
            None => Self { source, key: Vec::new(), indirection_table: Vec::new(), input_transform: 0 },
            Some(rss) => Self {
                source,
                key: rss.key.key_bytes().to_vec(),
                indirection_table: rss
                    .indirection_table
                    .queue_by_entry()
                    .iter()
                    .map(|queue| u32::from(*queue))
                    .collect(),
                input_transform: rss.key.input_transform().ethtool_number().into(),
            },
        }
    }
}

impl TryFrom<&v1::Rss> for ReportedRss {
    type Error = WireError;

    fn try_from(message: &v1::Rss) -> Result<Self, WireError> {
        let source = sanitize_str(&message.source);
        if message.key.is_empty() && message.indirection_table.is_empty() {
            return Ok(Self { source, rss: None });
        }
        let key = parse_rss_key(&message.key, message.input_transform)?;
        let indirection_table = IndirectionTable::new(&message.indirection_table)
            .map_err(|error| WireError::new("indirection_table", error))?;
        Ok(Self { source, rss: Some(RssConfig { key, indirection_table }) })
    }
}

/// Parses an RSS key and its input transform. Fails if the key's length is wrong or the transform is unknown.
pub(crate) fn parse_rss_key(bytes: &[u8], input_transform: u32) -> Result<RssKey, WireError> {
    let key = RssKey::new(bytes).map_err(|error| WireError::new("key", error))?;
    let transform =
        RssInputTransform::try_from(input_transform).map_err(|error| WireError::new("input_transform", error))?;
    Ok(key.with_input_transform(transform))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rss_message(key_bytes: usize, entry_count: usize) -> v1::Rss {
        let indirection_table = (0..entry_count as u32).collect();
        v1::Rss { source: "ethtool".into(), key: vec![7; key_bytes], indirection_table, input_transform: 0 }
    }

    #[test]
    fn known_and_unknown_rss_round_trip() {
        let symmetric_message = v1::Rss { input_transform: 2, ..rss_message(40, 128) };
        for message in [rss_message(40, 128), rss_message(52, 2048), rss_message(0, 0), symmetric_message] {
            assert_eq!(v1::Rss::from(&ReportedRss::try_from(&message).unwrap()), message);
        }
    }

    #[test]
    fn malformed_rss_is_rejected() {
        let parse_error = |message| ReportedRss::try_from(&message).unwrap_err().to_string();
        assert_eq!(
            parse_error(rss_message(40, 100)),
            "indirection_table: an indirection table of 100 entries: expected a power of two from 1 to 2048"
        );
        assert_eq!(parse_error(rss_message(39, 128)), "key: an RSS key of 39 bytes: expected 40 to 52");
        assert_eq!(parse_error(rss_message(0, 128)), "key: an RSS key of 0 bytes: expected 40 to 52");
        assert_eq!(
            parse_error(v1::Rss { input_transform: 3, ..rss_message(40, 128) }),
            "input_transform: input transform 3 of RSS: expected 0 (none), 1 (symmetric-xor) or 2 (symmetric-or-xor)"
        );
    }
}
