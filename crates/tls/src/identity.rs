//! Identity in a certificate, which is the URI `coreward://FLEET/ROLE/NAME` among the subject alternative names, as in
//! SPIFFE. Any public-key infrastructure can issue such certificates. The identity contains no addresses, because these
//! change.

use std::fmt;
use std::str::FromStr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Characters of a name that are percent-encoded in a URI: all except the unreserved characters of RFC 3986.
const URI_ESCAPED_CHARACTERS: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// URI scheme of the owner's identity in a certificate.
pub const IDENTITY_URI_SCHEME: &str = "coreward://";
const MAX_IDENTITY_NAME_BYTES: usize = 64;

/// Role of a certificate's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FleetRole {
    /// Controller, which all other roles trust.
    Controller,
    Agent,
    /// Load balancer, which receives the cookie keys and the placement tables.
    Lb,
    /// Rack controller, which sends reports for the servers of a rack.
    Rack,
    Operator,
    Viewer,
}

impl FleetRole {
    pub const ALL: [Self; 6] = [Self::Controller, Self::Agent, Self::Lb, Self::Rack, Self::Operator, Self::Viewer];

    pub fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Agent => "agent",
            Self::Lb => "lb",
            Self::Rack => "rack",
            Self::Operator => "operator",
            Self::Viewer => "viewer",
        }
    }
}

impl fmt::Display for FleetRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FleetRole {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|role| role.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("role {text:?} is not known: expected one of {names}")
        })
    }
}

/// Name of a fleet or of one of its members: 1 to 64 bytes, without whitespace and control characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdentityName(String);

impl IdentityName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for IdentityName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for IdentityName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_printable = text.chars().all(|c| !c.is_whitespace() && !c.is_control());
        match (1..=MAX_IDENTITY_NAME_BYTES).contains(&text.len()) && is_printable {
            true => Ok(Self(text.to_owned())),
            false => Err(format!("name {text:?}: expected 1 to {MAX_IDENTITY_NAME_BYTES} bytes without blanks")),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FleetIdentity {
    pub fleet: IdentityName,
    pub role: FleetRole,
    /// Name of the owner. An agent has the name of its server in the fleet document, a load balancer the name in its
    /// configuration file. Other roles' names appear only in logs.
    pub name: IdentityName,
}

impl FleetIdentity {
    pub fn identity_uri(&self) -> String {
        let percent_encode_name =
            |name: &IdentityName| utf8_percent_encode(&name.0, URI_ESCAPED_CHARACTERS).to_string();
        format!(
            "{IDENTITY_URI_SCHEME}{}/{}/{}",
            percent_encode_name(&self.fleet),
            self.role,
            percent_encode_name(&self.name)
        )
    }
}

impl fmt::Display for FleetIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.name)
    }
}

impl FromStr for FleetIdentity {
    type Err = String;

    fn from_str(uri: &str) -> Result<Self, String> {
        let invalid_message =
            |reason: &str| format!("{uri:?}: {reason}: expected {IDENTITY_URI_SCHEME}FLEET/ROLE/NAME");
        let path = uri.strip_prefix(IDENTITY_URI_SCHEME).ok_or_else(|| invalid_message("another scheme"))?;
        let [fleet, role, name] = path.split('/').collect::<Vec<_>>()[..] else {
            return Err(invalid_message("not three parts"));
        };
        let decode_name = |text: &str| {
            let name_text = percent_decode_str(text).decode_utf8().map_err(|_| invalid_message("not UTF-8"))?;
            name_text.parse::<IdentityName>().map_err(|reason| invalid_message(&reason))
        };
        let role = role.parse().map_err(|reason: String| invalid_message(&reason))?;
        Ok(Self { fleet: decode_name(fleet)?, role, name: decode_name(name)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_with_any_name_round_trip() {
        for (name, escaped_name) in
            [("s1", "s1"), ("server.one_2-a~", "server.one_2-a~"), ("a/b", "a%2Fb"), ("ä", "%C3%A4")]
        {
            for role in FleetRole::ALL {
                let identity = FleetIdentity { fleet: "prod".parse().unwrap(), role, name: name.parse().unwrap() };
                assert_eq!(identity.identity_uri(), format!("coreward://prod/{role}/{escaped_name}"));
                assert_eq!(identity.identity_uri().parse(), Ok(identity));
            }
        }
    }

    #[test]
    fn invalid_identities_are_rejected() {
        let cases = [
            ("spiffe://prod/agent/s1", "another scheme"),
            ("coreward://prod/agent", "not three parts"),
            ("coreward://prod/agent/s1/x", "not three parts"),
            (
                "coreward://prod/root/s1",
                "role \"root\" is not known: expected one of controller, agent, lb, rack, operator, viewer",
            ),
            ("coreward:///agent/s1", "name \"\": expected 1 to 64 bytes without blanks"),
            ("coreward://prod/agent/s%201", "name \"s 1\": expected 1 to 64 bytes without blanks"),
            ("coreward://prod/agent/%ff", "not UTF-8"),
        ];
        for (uri, reason) in cases {
            let expected = format!("{uri:?}: {reason}: expected coreward://FLEET/ROLE/NAME");
            assert_eq!(uri.parse::<FleetIdentity>(), Err(expected));
        }
    }
}
