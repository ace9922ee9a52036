//! Consistency modes: the way from a service's packet to the server of its connection.

use coreward_intf as intf;

use crate::ServerId;
use crate::forwarding::Forwarding;
use crate::tuple::Protocol;

/// `enum consistency` of `bpf/include/intf.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Consistency {
    /// By the server's id in the cookie (Cheetah, NSDI'20, Sect. 3.2): no memory at the load balancer.
    #[default]
    Stateless,
    /// By an index in the cookie into the connection table (Sect. 3.3).
    Stateful,
    /// None: each packet goes to the placement rule's server.
    None,
    /// By a hash table of connections, as in most load balancers.
    HashTable,
    /// By the bucket; a server forwards unknown packets to the bucket's previous server (Beamer, NSDI'18).
    Beamer,
}

impl Consistency {
    /// All modes in the order of `enum consistency`.
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

/// An unknown consistency mode.
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

/// Origin of the cookies in a service's TCP timestamps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Timestamps {
    /// The servers, by `bpf/server/server.bpf.c`.
    #[default]
    Server,
    /// The load balancer, for servers without an agent whose answers pass through it.
    LoadBalancer,
    /// None: for clients behind devices that reject them.
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

/// An unknown origin of timestamps.
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

/// Migration: another load balancer has some of a service's connections. It is one of the service's servers, by this
/// id, and takes no new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// The other one had the service before: unknown packets here belong to its connections.
    AdoptedFrom(ServerId),
    /// The other one gets new connections; those opened here remain here.
    HandedOverTo(ServerId),
}

impl Transfer {
    /// Returns the other load balancer's id among the servers.
    pub fn other_balancer(self) -> ServerId {
        match self {
            Transfer::AdoptedFrom(id) | Transfer::HandedOverTo(id) => id,
        }
    }
}

/// Data-plane settings of a service besides its address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ServiceMode {
    /// Consistency mode.
    pub consistency: Consistency,
    /// Origin of the cookies.
    pub timestamps: Timestamps,
    /// Migration in progress.
    pub transfer: Option<Transfer>,
    /// How packets reach servers.
    pub forwarding: Forwarding,
}

impl ServiceMode {
    /// Whether the service's packets find their server by a cookie, if they carry one.
    pub fn has_cookies(self) -> bool {
        matches!(self.consistency, Consistency::Stateless | Consistency::Stateful)
    }

    /// Whether servers put cookies into the timestamps of the service.
    pub fn is_stamped(self) -> bool {
        self.has_cookies() && self.timestamps == Timestamps::Server
    }

    /// Whether servers put cookies into the timestamps of new connections.
    pub fn stamps_new_connections(self) -> bool {
        self.is_stamped() && !self.is_handed_over()
    }

    /// Whether another load balancer gets the first packets.
    pub fn is_handed_over(self) -> bool {
        matches!(self.transfer, Some(Transfer::HandedOverTo(_)))
    }

    /// Whether the service can be migrated: packets that begin a connection must be recognisable, and a packet at the
    /// wrong server must be forwarded from there.
    pub fn can_transfer(self) -> bool {
        // The other load balancer is reached by its MAC address, by servers too.
        if self.forwarding.encapsulates() {
            return false;
        }
        match self.consistency {
            Consistency::Stateless | Consistency::Stateful => self.timestamps != Timestamps::LoadBalancer,
            Consistency::HashTable => true,
            Consistency::None | Consistency::Beamer => false,
        }
    }

    /// Whether packets that go by their bucket name its previous server. With LB-side stamping, servers have no program
    /// that could read it. During a migration all packets name the other load balancer.
    pub fn marks_previous_server(self) -> bool {
        self.consistency == Consistency::Beamer
            || self.has_cookies() && self.timestamps == Timestamps::Off
            || self.transfer.is_some()
    }

    /// Returns the default mode. UDP has no cookie: by flow.
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
    fn names_round_trip() {
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
