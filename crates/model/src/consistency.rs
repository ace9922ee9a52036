//! Consistency modes, by which a packet finds the server of its connection.

use coreward_intf as intf;

use crate::ServerId;
use crate::forwarding::ForwardingMode;
use crate::tuple::{ServerIdOutOfRange, TransportProtocol};

/// Method by which packets find the server of their connection (`enum consistency` of `bpf/include/intf.h`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ConsistencyMode {
    /// The cookie has the server's id, so the load balancer needs no memory (Cheetah, NSDI'20, Sect. 3.2).
    #[default]
    Stateless,
    /// The cookie has an index into the connection table (Cheetah, Sect. 3.3).
    Stateful,
    /// No consistency. Each packet goes to the server that the placement rule selects for this packet.
    None,
    /// A hash table maps each connection to its server, as in most load balancers.
    HashTable,
    /// The packet's hash bucket selects the server. The server forwards packets of unknown connections to the bucket's
    /// previous server (Beamer, NSDI'18).
    Beamer,
}

impl ConsistencyMode {
    /// All consistency modes in the order of `enum consistency`.
    pub const ALL: [ConsistencyMode; intf::CONSISTENCY_COUNT as usize] = [
        ConsistencyMode::Stateless,
        ConsistencyMode::Stateful,
        ConsistencyMode::None,
        ConsistencyMode::HashTable,
        ConsistencyMode::Beamer,
    ];

    /// Returns the mode's value in `enum consistency`.
    pub fn bpf_number(self) -> u32 {
        self as u32
    }

    /// Returns the mode's name in configuration and messages, which is the name in `bpf/include/intf.h` with dashes.
    pub fn name(self) -> String {
        intf::CONSISTENCY_NAMES[self as usize].replace('_', "-")
    }
}

/// Error returned for the name of an unknown consistency mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("consistency {0:?} is not known: expected \"stateless\", \"stateful\", \"none\", \"hash-table\" or \"beamer\"")]
pub struct UnknownConsistencyMode(pub String);

impl std::str::FromStr for ConsistencyMode {
    type Err = UnknownConsistencyMode;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let matching_mode = Self::ALL.into_iter().find(|consistency| consistency.name() == name);
        matching_mode.ok_or_else(|| UnknownConsistencyMode(name.to_owned()))
    }
}

/// Component that writes the cookies into the TCP timestamps of a service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CookieStamper {
    /// The servers write the cookies, by `bpf/server/server.bpf.c`.
    #[default]
    Server,
    /// The load balancer writes the cookies into replies, which must pass through it. The servers have no agent.
    LoadBalancer,
    /// Packets have no cookies, as needed for clients behind devices that reject them.
    Off,
}

impl CookieStamper {
    /// Returns the name of this origin in configuration and messages.
    pub fn name(self) -> &'static str {
        match self {
            CookieStamper::Server => "server",
            CookieStamper::LoadBalancer => "lb",
            CookieStamper::Off => "off",
        }
    }
}

/// Error returned for the name of an unknown [`CookieStamper`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("timestamps by {0:?}: expected \"server\", \"lb\" or \"off\"")]
pub struct UnknownCookieStamper(pub String);

impl std::str::FromStr for CookieStamper {
    type Err = UnknownCookieStamper;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let origins = [CookieStamper::Server, CookieStamper::LoadBalancer, CookieStamper::Off];
        origins.into_iter().find(|origin| origin.name() == name).ok_or_else(|| UnknownCookieStamper(name.to_owned()))
    }
}

/// Migration of a service between this load balancer and another, which has some of the connections. The other load
/// balancer has the given id among the service's servers, and is not eligible for placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServiceMigration {
    /// The other load balancer had the service before, so packets of unknown connections belong to it.
    AdoptedFrom(ServerId),
    /// The other load balancer gets new connections, and this one keeps its existing connections.
    HandedOverTo(ServerId),
}

impl ServiceMigration {
    /// Returns the id that the other load balancer has among the service's servers.
    pub fn other_balancer_id(self) -> ServerId {
        match self {
            ServiceMigration::AdoptedFrom(id) | ServiceMigration::HandedOverTo(id) => id,
        }
    }
}

/// Error returned for an invalid setting of a service's mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct InvalidServiceModeSetting {
    /// Name of the invalid setting.
    pub key: String,
    /// Description of the value that was found and of the expected value.
    pub reason: String,
}

const CONSISTENCY_CONFIG_KEY: &str = "consistency";
const TIMESTAMPS_CONFIG_KEY: &str = "timestamps";
const FORWARDING_CONFIG_KEY: &str = "forwarding";
const ADOPTED_FROM_CONFIG_KEY: &str = "adopted_from";
const HANDED_OVER_TO_CONFIG_KEY: &str = "handed_over_to";

/// Settings of a service in the data plane, except the service's address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ServiceSettings {
    /// Consistency mode of the service.
    pub consistency: ConsistencyMode,
    /// Component that writes the cookies into the TCP timestamps.
    pub timestamps: CookieStamper,
    /// Migration of the service that is in progress, if any.
    pub migration: Option<ServiceMigration>,
    /// Method by which the load balancer forwards packets to servers.
    pub forwarding: ForwardingMode,
}

impl ServiceSettings {
    /// Returns whether packets of the service may carry a cookie that identifies their server.
    pub fn has_cookies(self) -> bool {
        matches!(self.consistency, ConsistencyMode::Stateless | ConsistencyMode::Stateful)
    }

    /// Returns whether servers write cookies into the timestamps of the service's packets.
    pub fn servers_stamp_packets(self) -> bool {
        self.has_cookies() && self.timestamps == CookieStamper::Server
    }

    /// Returns whether servers write cookies into the timestamps of new connections of the service.
    pub fn servers_stamp_new_connections(self) -> bool {
        self.servers_stamp_packets() && !self.is_handed_over()
    }

    /// Returns whether another load balancer gets the service's new connections.
    pub fn is_handed_over(self) -> bool {
        matches!(self.migration, Some(ServiceMigration::HandedOverTo(_)))
    }

    /// Returns whether the service can be migrated. Its first packets must be recognisable, and its servers must
    /// forward packets of unknown connections.
    pub fn can_migrate(self) -> bool {
        // Encapsulation rules a migration out, because the other load balancer is reached by its MAC address.
        if self.forwarding.encapsulates() {
            return false;
        }
        match self.consistency {
            ConsistencyMode::Stateless | ConsistencyMode::Stateful => self.timestamps != CookieStamper::LoadBalancer,
            ConsistencyMode::HashTable => true,
            ConsistencyMode::None | ConsistencyMode::Beamer => false,
        }
    }

    /// Returns whether packets that are forwarded by bucket carry the id of the bucket's previous server. With LB-side
    /// stamping, servers have no program that reads the id. In a migration, all packets carry the other load balancer's
    /// id.
    pub fn packets_carry_previous_server_id(self) -> bool {
        self.consistency == ConsistencyMode::Beamer
            || self.has_cookies() && self.timestamps == CookieStamper::Off
            || self.migration.is_some()
    }

    /// Returns the name and the value of each setting, for messages.
    pub fn key_value_pairs(self) -> Vec<(&'static str, String)> {
        let mut settings = vec![
            (CONSISTENCY_CONFIG_KEY, self.consistency.name()),
            (TIMESTAMPS_CONFIG_KEY, self.timestamps.name().to_owned()),
            (FORWARDING_CONFIG_KEY, self.forwarding.name().to_owned()),
        ];
        settings.extend(self.migration.map(|migration| match migration {
            ServiceMigration::AdoptedFrom(id) => (ADOPTED_FROM_CONFIG_KEY, id.to_string()),
            ServiceMigration::HandedOverTo(id) => (HANDED_OVER_TO_CONFIG_KEY, id.to_string()),
        }));
        settings
    }

    /// Returns the settings with these names and values, as the inverse of [`ServiceSettings::key_value_pairs`]. Absent
    /// settings have their defaults. Fails if a setting is unknown, because packets must not be forwarded in another
    /// mode than requested.
    pub fn from_key_value_pairs<'a>(
        settings: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, InvalidServiceModeSetting> {
        let mut parsed_settings = Self::default();
        for (key, value) in settings {
            match key {
                CONSISTENCY_CONFIG_KEY => parsed_settings.consistency = parse_setting(key, value)?,
                TIMESTAMPS_CONFIG_KEY => parsed_settings.timestamps = parse_setting(key, value)?,
                FORWARDING_CONFIG_KEY => parsed_settings.forwarding = parse_setting(key, value)?,
                ADOPTED_FROM_CONFIG_KEY => {
                    parsed_settings.migration = Some(ServiceMigration::AdoptedFrom(parse_server_id(key, value)?))
                }
                HANDED_OVER_TO_CONFIG_KEY => {
                    parsed_settings.migration = Some(ServiceMigration::HandedOverTo(parse_server_id(key, value)?))
                }
                _ => {
                    let reason = format!("this version does not have it, value {value:?}: expected a newer version");
                    return Err(InvalidServiceModeSetting { key: key.to_owned(), reason });
                }
            }
        }
        Ok(parsed_settings)
    }

    /// Returns the bits of these settings in `service_slot.number` of `bpf/include/intf.h`. They include neither the
    /// service's index nor the forwarding method.
    pub fn to_service_slot_bits(self) -> u32 {
        let timestamp_bits = match self.timestamps {
            CookieStamper::Server => 0,
            CookieStamper::Off => intf::SERVICE_TIMESTAMPS_OFF,
            CookieStamper::LoadBalancer => intf::SERVICE_TIMESTAMPS_LB,
        };
        let migration_bits = self.migration.map_or(0, |migration| {
            let direction_bit = match migration {
                ServiceMigration::AdoptedFrom(_) => intf::SERVICE_ADOPTED,
                ServiceMigration::HandedOverTo(_) => intf::SERVICE_HANDED_OVER,
            };
            direction_bit | u32::from(migration.other_balancer_id().get()) << intf::SERVICE_OTHER_BALANCER_SHIFT
        });
        self.consistency.bpf_number() << intf::SERVICE_CONSISTENCY_SHIFT | timestamp_bits | migration_bits
    }

    /// Returns the settings that these [`ServiceSettings::to_service_slot_bits`] encode, with the default forwarding
    /// method. Returns `None` if the bits encode no valid settings.
    pub fn from_service_slot_bits(bits: u32) -> Option<Self> {
        let consistency = bits >> intf::SERVICE_CONSISTENCY_SHIFT & intf::SERVICE_CONSISTENCY_MASK;
        let timestamps = match bits & (intf::SERVICE_TIMESTAMPS_OFF | intf::SERVICE_TIMESTAMPS_LB) {
            0 => CookieStamper::Server,
            intf::SERVICE_TIMESTAMPS_OFF => CookieStamper::Off,
            _ => CookieStamper::LoadBalancer,
        };
        let other_balancer_id = bits >> intf::SERVICE_OTHER_BALANCER_SHIFT & (intf::SERVER_ID_COUNT - 1);
        let other_balancer = ServerId::try_from(u64::from(other_balancer_id)).ok()?;
        let migration = match bits & (intf::SERVICE_ADOPTED | intf::SERVICE_HANDED_OVER) {
            0 => None,
            intf::SERVICE_ADOPTED => Some(ServiceMigration::AdoptedFrom(other_balancer)),
            _ => Some(ServiceMigration::HandedOverTo(other_balancer)),
        };
        let consistency = *ConsistencyMode::ALL.get(consistency as usize)?;
        let decoded_settings = Self { consistency, timestamps, migration, forwarding: ForwardingMode::default() };
        (decoded_settings.to_service_slot_bits() == bits).then_some(decoded_settings)
    }

    /// Returns the default settings for services of a protocol. UDP has no cookie, so its default is the hash table.
    pub fn default_for_protocol(protocol: TransportProtocol) -> Self {
        match protocol {
            TransportProtocol::Tcp => Self::default(),
            TransportProtocol::Udp => {
                Self { consistency: ConsistencyMode::HashTable, timestamps: CookieStamper::Off, ..Self::default() }
            }
        }
    }
}

fn parse_setting<T: std::str::FromStr<Err: std::fmt::Display>>(
    key: &str,
    value: &str,
) -> Result<T, InvalidServiceModeSetting> {
    value.parse().map_err(|error: T::Err| InvalidServiceModeSetting { key: key.to_owned(), reason: error.to_string() })
}

fn parse_server_id(key: &str, value: &str) -> Result<ServerId, InvalidServiceModeSetting> {
    let id: u64 = parse_setting(key, value)?;
    id.try_into().map_err(|error: ServerIdOutOfRange| InvalidServiceModeSetting {
        key: key.to_owned(),
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service_settings_combinations() -> Vec<ServiceSettings> {
        let other_balancer = ServerId::try_from(16_383).unwrap();
        let mut modes = Vec::new();
        for consistency in ConsistencyMode::ALL {
            for timestamps in [CookieStamper::Server, CookieStamper::Off, CookieStamper::LoadBalancer] {
                for migration in [
                    None,
                    Some(ServiceMigration::AdoptedFrom(other_balancer)),
                    Some(ServiceMigration::HandedOverTo(other_balancer)),
                ] {
                    let mode_with_forwarding =
                        |forwarding| ServiceSettings { consistency, timestamps, migration, forwarding };
                    modes.extend(ForwardingMode::ALL.map(mode_with_forwarding));
                }
            }
        }
        modes
    }

    #[test]
    fn service_settings_round_trip() {
        for mode in service_settings_combinations() {
            let settings = mode.key_value_pairs();
            let name_value_pairs = settings.iter().map(|(key, value)| (*key, value.as_str()));
            assert_eq!(ServiceSettings::from_key_value_pairs(name_value_pairs), Ok(mode));
        }
        assert_eq!(ServiceSettings::from_key_value_pairs([]), Ok(ServiceSettings::default()));
        let error_text = |key, value| ServiceSettings::from_key_value_pairs([(key, value)]).unwrap_err().to_string();
        assert!(
            error_text("consistency", "sticky")
                .starts_with("consistency: consistency \"sticky\" is not known: expected")
        );
        assert!(
            error_text("timestamps", "client").starts_with("timestamps: timestamps by \"client\": expected \"server\"")
        );
        assert!(
            error_text("forwarding", "vxlan").starts_with("forwarding: forwarding \"vxlan\" is not known: expected")
        );
        assert!(error_text("adopted_from", "16384").starts_with("adopted_from: "));
        assert!(error_text("mss", "1400").starts_with("mss: this version does not have it, value \"1400\""));
    }

    #[test]
    fn service_slot_bits_round_trip() {
        for mode in service_settings_combinations() {
            let expected_mode = ServiceSettings { forwarding: ForwardingMode::default(), ..mode };
            assert_eq!(ServiceSettings::from_service_slot_bits(mode.to_service_slot_bits()), Some(expected_mode));
        }
        for invalid_bits in
            [intf::SERVICE_ADDRESS_ONLY, intf::NO_SERVICE, 5 << intf::SERVICE_CONSISTENCY_SHIFT, 1 << 20]
        {
            assert_eq!(
                ServiceSettings::from_service_slot_bits(invalid_bits & !intf::SERVICE_INDEX_MASK),
                None,
                "{invalid_bits:#x}"
            );
        }
    }

    #[test]
    fn mode_names_round_trip() {
        for consistency in ConsistencyMode::ALL {
            assert_eq!(consistency.name().parse(), Ok(consistency));
        }
        assert_eq!(ConsistencyMode::HashTable.name(), "hash-table");
        for timestamps in [CookieStamper::Server, CookieStamper::LoadBalancer, CookieStamper::Off] {
            assert_eq!(timestamps.name().parse(), Ok(timestamps));
        }
        assert!(
            "sticky"
                .parse::<ConsistencyMode>()
                .unwrap_err()
                .to_string()
                .starts_with("consistency \"sticky\" is not known")
        );
    }
}
