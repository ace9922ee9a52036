//! How a service's packets find the server that its connection's first packet found.

use coreward_intf as intf;

use crate::ServerId;
use crate::tuple::Protocol;

/// `enum consistency` of `bpf/include/intf.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Consistency {
    /// By the server's id in the cookie (Cheetah, NSDI'20, Sect. 3.2): no memory at the load balancer.
    #[default]
    Stateless,
    /// By an index in the cookie into the connection table (Sect. 3.3).
    Stateful,
    /// Not at all: each packet goes where the placement rule says.
    None,
    /// By a hash table of connections, as most load balancers do.
    HashTable,
    /// By the bucket; a server hands what it does not know to the one that had the bucket before (Beamer, NSDI'18).
    Beamer,
}

impl Consistency {
    /// All in the order of `enum consistency`.
    pub const ALL: [Consistency; intf::CONSISTENCY_COUNT as usize] =
        [Consistency::Stateless, Consistency::Stateful, Consistency::None, Consistency::HashTable, Consistency::Beamer];

    /// The value in `enum consistency`.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The name as configuration and wire write it: that of `bpf/include/intf.h` with dashes.
    pub fn name(self) -> String {
        intf::CONSISTENCY_NAMES[self as usize].replace('_', "-")
    }
}

/// A way of being consistent that there is not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("consistency {0:?} is not known: expected \"stateless\", \"stateful\", \"none\", \"hash-table\" or \"beamer\"")]
pub struct UnknownConsistency(pub String);

impl std::str::FromStr for Consistency {
    type Err = UnknownConsistency;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|consistency| consistency.name() == name);
        known.ok_or_else(|| UnknownConsistency(name.to_owned()))
    }
}

/// Who puts cookies into a service's TCP timestamps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Timestamps {
    /// The servers, by `bpf/server/server.bpf.c`.
    #[default]
    Server,
    /// The load balancer, for servers without an agent whose answers pass through it.
    LoadBalancer,
    /// Nobody: for clients behind something that does not like them.
    Off,
}

impl Timestamps {
    /// The name as configuration and wire write it.
    pub fn name(self) -> &'static str {
        match self {
            Timestamps::Server => "server",
            Timestamps::LoadBalancer => "lb",
            Timestamps::Off => "off",
        }
    }
}

/// Nobody who could do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("timestamps by {0:?}: expected \"server\", \"lb\" or \"off\"")]
pub struct UnknownTimestamps(pub String);

impl std::str::FromStr for Timestamps {
    type Err = UnknownTimestamps;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let all = [Timestamps::Server, Timestamps::LoadBalancer, Timestamps::Off];
        all.into_iter().find(|timestamps| timestamps.name() == name).ok_or_else(|| UnknownTimestamps(name.to_owned()))
    }
}

/// Another load balancer has some of a service's connections. It stands among the service's servers, by this id, and takes no
/// first packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// It had the service before us: what nobody here knows is one of its connections.
    AdoptedFrom(ServerId),
    /// It gets the first packets from now on; what was opened here goes on here.
    HandedOverTo(ServerId),
}

impl Transfer {
    /// The other load balancer's place among the servers.
    pub fn other_balancer(self) -> ServerId {
        match self {
            Transfer::AdoptedFrom(id) | Transfer::HandedOverTo(id) => id,
        }
    }
}

/// What the data plane must know of a service beside its address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ServiceMode {
    /// How packets find their server.
    pub consistency: Consistency,
    /// Who stamps.
    pub timestamps: Timestamps,
    /// Whether the service is adopted or given back just now.
    pub transfer: Option<Transfer>,
}

impl ServiceMode {
    /// Whether the service's packets find their server by a cookie, where they carry one.
    pub fn has_cookies(self) -> bool {
        matches!(self.consistency, Consistency::Stateless | Consistency::Stateful)
    }

    /// Whether servers put cookies into the timestamps of the service.
    pub fn is_stamped(self) -> bool {
        self.has_cookies() && self.timestamps == Timestamps::Server
    }

    /// Whether servers put cookies into the timestamps of connections that begin now.
    pub fn stamps_new_connections(self) -> bool {
        self.is_stamped() && !self.is_handed_over()
    }

    /// Whether another load balancer gets the first packets.
    pub fn is_handed_over(self) -> bool {
        matches!(self.transfer, Some(Transfer::HandedOverTo(_)))
    }

    /// Whether the service can be adopted or handed over at all: packets that begin a connection must show it, and what is
    /// sent to the wrong server must be handed on there.
    pub fn can_transfer(self) -> bool {
        match self.consistency {
            Consistency::Stateless | Consistency::Stateful => self.timestamps != Timestamps::LoadBalancer,
            Consistency::HashTable => true,
            Consistency::None | Consistency::Beamer => false,
        }
    }

    /// Whether packets that go by their bucket name the server that had it before. Servers that the load balancer itself
    /// stamps for have no program that could read it. While the service is adopted or given back all packets name the other
    /// load balancer.
    pub fn names_server_before(self) -> bool {
        self.consistency == Consistency::Beamer
            || self.has_cookies() && self.timestamps == Timestamps::Off
            || self.transfer.is_some()
    }

    /// Everything as it is when the operator says nothing. UDP has no cookie: by flow.
    pub fn default_for(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::default(),
            Protocol::Udp => {
                Self { consistency: Consistency::HashTable, timestamps: Timestamps::Off, ..Self::default() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for consistency in Consistency::ALL {
            assert_eq!(consistency.name().parse(), Ok(consistency));
        }
        assert_eq!(Consistency::HashTable.name(), "hash-table");
        for timestamps in [Timestamps::Server, Timestamps::LoadBalancer, Timestamps::Off] {
            assert_eq!(timestamps.name().parse(), Ok(timestamps));
        }
        assert!(
            "sticky".parse::<Consistency>().unwrap_err().to_string().starts_with("consistency \"sticky\" is not known")
        );
    }
}
