//! Reads and sets the RSS configuration of a real NIC with ethtool ioctls. Netlink cannot set RSS before kernel 6.17,
//! and no crate covers these ioctls.
//!
//! The layouts are those of include/uapi/linux/ethtool.h. Each request is a buffer that begins with the command number.

use std::fs;
use std::io;
use std::net::IpAddr;

use coreward_dataplane::ethtool::{self, ETH_FLAG_LRO, ETH_FLAG_NTUPLE, ETH_FLAG_RXVLAN, receive_queue_count};
use coreward_model::rss::RssConfig;
use coreward_model::tuple::TransportProtocol;

use super::{RssDevice, RssError, RssSettings};

const ETHTOOL_GDRVINFO: u32 = 0x03;
const ETHTOOL_GPFLAGS: u32 = 0x27;
const ETHTOOL_GRXFH: u32 = 0x29;
const ETHTOOL_GRXRINGS: u32 = 0x2d;
const ETHTOOL_GRXCLSRLCNT: u32 = 0x2e;
const ETHTOOL_GRSSH: u32 = 0x46;
const ETHTOOL_SRSSH: u32 = 0x47;

/// Flags of the hashed fields: source and destination IP address, source port, and destination port.
const RXH_ADDRESSES_AND_PORTS: u64 = 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7;
const ETH_RSS_HASH_TOP: u8 = 1;
/// Value of the hash function field that leaves the NIC's hash function unchanged.
const ETH_RSS_HASH_NO_CHANGE: u8 = 0;
const ETH_RXFH_INDIR_NO_CHANGE: u32 = 0xffff_ffff;
const ETH_RXFH_INDIR_DEFAULT: u32 = 0;

/// Length of `struct ethtool_rxfh` without its data, in 32-bit words. Its fields are cmd, rss_context, indir_size,
/// key_size, (hfunc, input_xfrm, 2 reserved bytes), and reserved.
const RXFH_HEADER_WORD_COUNT: usize = 6;
const RXFH_INDIR_SIZE_INDEX: usize = 2;
const RXFH_KEY_SIZE_INDEX: usize = 3;
const RXFH_FUNCTION_INDEX: usize = 4;
/// Number of 32-bit words reserved for `struct ethtool_rxnfc`. It exceeds the length of the requests here, because the
/// kernel may copy the whole structure back.
const RXNFC_WORD_COUNT: usize = 64;
/// Word index of `rule_cnt` in `struct ethtool_rxnfc`. It follows cmd, flow_type, data (8 bytes) and fs (168 bytes).
const RXNFC_RULE_COUNT_INDEX: usize = (4 + 4 + 8 + 168) / 4;

/// File with the kernel's default RSS key, which NICs use if their driver shows none. It contains the first bytes of
/// the key that netdev_rss_key_fill() returns (net/core/dev.c).
const NETDEV_RSS_KEY_PATH: &str = "/proc/sys/net/core/netdev_rss_key";
const NETDEV_RSS_KEY_BYTES: usize = 40;

/// Executes an ethtool ioctl. `request` contains the command as 32-bit words, and receives the answer.
fn execute_ethtool_request(interface: &str, request: &mut [u32]) -> io::Result<()> {
    // SAFETY: `request` is as long as its header states, which every caller of this private function ensures.
    unsafe { ethtool::ethtool_ioctl(interface, request) }
}

/// Returns the 64-bit field `data` of `struct ethtool_rxnfc`, which follows cmd and flow_type.
fn read_rxnfc_data(interface: &str, command: u32, flow_type: u32) -> io::Result<u64> {
    let mut request = [0; RXNFC_WORD_COUNT];
    request[0] = command;
    request[1] = flow_type;
    execute_ethtool_request(interface, &mut request)?;
    Ok(u64::from(request[2]) | u64::from(request[3]) << 32)
}

pub fn driver_name(interface: &str) -> io::Result<String> {
    // struct ethtool_drvinfo begins with cmd (4 bytes) and the driver's name (32 bytes), followed by 160 other bytes.
    let mut request = [0; 49];
    request[0] = ETHTOOL_GDRVINFO;
    execute_ethtool_request(interface, &mut request)?;
    let driver_name: Vec<u8> = request[1..9]
        .iter()
        .flat_map(|request_word| request_word.to_ne_bytes())
        .take_while(|byte| *byte != 0)
        .collect();
    Ok(String::from_utf8_lossy(&driver_name).into_owned())
}

/// Returns whether the device merges received packets in hardware (large receive offload, LRO).
pub fn is_lro_enabled(interface: &str) -> io::Result<bool> {
    Ok(ethtool::read_offload_flags(interface)? & ETH_FLAG_LRO != 0)
}

/// Returns whether the device strips VLAN tags from received packets, so that XDP programs see no tag.
pub fn strips_vlan_tags(interface: &str) -> io::Result<bool> {
    Ok(ethtool::read_offload_flags(interface)? & ETH_FLAG_RXVLAN != 0)
}

/// Returns the value of a private flag of the driver (`ethtool --show-priv-flags`), or `None` if it has no such flag.
pub fn read_private_flag(interface: &str, flag_name: &str) -> Option<bool> {
    const ETH_SS_PRIV_FLAGS: u32 = 2;
    // The kernel keeps all private flags in one 32-bit word.
    let flag_names = ethtool::driver_string_set(interface, ETH_SS_PRIV_FLAGS, u32::BITS).ok()?;
    let flag_index = flag_names.iter().position(|flag| flag == flag_name)?;
    let mut flags_request = [ETHTOOL_GPFLAGS, 0];
    execute_ethtool_request(interface, &mut flags_request).ok()?;
    Some(flags_request[1] >> flag_index & 1 != 0)
}

/// Kind of traffic whose hashed fields are set separately, as by `ethtool -N DEVICE rx-flow-hash`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RssFlowType {
    Tcp4,
    Udp4,
    Tcp6,
    Udp6,
}

impl RssFlowType {
    pub const ALL: [Self; 4] = [Self::Tcp4, Self::Udp4, Self::Tcp6, Self::Udp6];

    pub fn new(protocol: TransportProtocol, address: IpAddr) -> Self {
        match (protocol, address.is_ipv6()) {
            (TransportProtocol::Tcp, false) => Self::Tcp4,
            (TransportProtocol::Udp, false) => Self::Udp4,
            (TransportProtocol::Tcp, true) => Self::Tcp6,
            (TransportProtocol::Udp, true) => Self::Udp6,
        }
    }

    /// Returns ethtool's name of the flow type.
    pub fn ethtool_name(self) -> &'static str {
        match self {
            Self::Tcp4 => "tcp4",
            Self::Udp4 => "udp4",
            Self::Tcp6 => "tcp6",
            Self::Udp6 => "udp6",
        }
    }

    /// Returns the kernel's number of the flow type: TCP_V4_FLOW, UDP_V4_FLOW, TCP_V6_FLOW or UDP_V6_FLOW.
    fn kernel_flow_type(self) -> u32 {
        match self {
            Self::Tcp4 => 1,
            Self::Udp4 => 2,
            Self::Tcp6 => 5,
            Self::Udp6 => 6,
        }
    }
}

/// Returns whether the NIC also hashes the ports for a flow type, or `None` if the driver does not report this.
pub fn hashes_ports(interface: &str, flow_type: RssFlowType) -> Option<bool> {
    read_hash_fields(interface, flow_type)
        .ok()
        .map(|fields| fields & RXH_ADDRESSES_AND_PORTS == RXH_ADDRESSES_AND_PORTS)
}

fn read_hash_fields(interface: &str, flow_type: RssFlowType) -> io::Result<u64> {
    read_rxnfc_data(interface, ETHTOOL_GRXFH, flow_type.kernel_flow_type())
}

/// Returns whether flow rules are enabled (ntuple), and the number of flow rules.
pub fn flow_rule_support_and_count(interface: &str) -> (bool, u64) {
    let is_ntuple_on = ethtool::read_offload_flags(interface).is_ok_and(|flags| flags & ETH_FLAG_NTUPLE != 0);
    let mut rule_count_request = [0; RXNFC_WORD_COUNT];
    rule_count_request[0] = ETHTOOL_GRXCLSRLCNT;
    let rule_count = execute_ethtool_request(interface, &mut rule_count_request)
        .map_or(0, |()| u64::from(rule_count_request[RXNFC_RULE_COUNT_INDEX]));
    (is_ntuple_on, rule_count)
}

/// Returns the first bytes of the kernel's default RSS key, which applies to NICs whose driver shows no key.
fn read_netdev_rss_key() -> Result<Vec<u8>, RssError> {
    let to_io_error = |source| RssError::Io { operation: NETDEV_RSS_KEY_PATH.to_owned(), source };
    let text = fs::read_to_string(NETDEV_RSS_KEY_PATH).map_err(to_io_error)?;
    let key_bytes: Result<Vec<u8>, _> =
        text.trim().split(':').map(|hex_byte| u8::from_str_radix(hex_byte, 16)).collect();
    let mut key_bytes = key_bytes.map_err(|error| to_io_error(io::Error::other(error)))?;
    key_bytes.truncate(NETDEV_RSS_KEY_BYTES);
    Ok(key_bytes)
}

/// NIC whose RSS settings the agent reads and sets with ethtool ioctls.
#[derive(Debug)]
pub struct EthtoolRssDevice {
    interface: String,
}

/// Decoded answer of a driver to the ioctl ETHTOOL_GRSSH, which returns the RSS settings.
struct EthtoolRxfhReply {
    settings: RssSettings,
    hash_function: u8,
}

impl EthtoolRssDevice {
    pub fn new(interface: &str) -> Self {
        Self { interface: interface.to_owned() }
    }

    fn ioctl_error(&self, ioctl_command: &str, source: io::Error) -> RssError {
        if source.raw_os_error() == Some(libc::EOPNOTSUPP) {
            return RssError::NoIndirectionTable(self.interface.clone());
        }
        RssError::Io { operation: format!("{}: {ioctl_command}", self.interface), source }
    }

    fn read_rxfh(&self) -> Result<EthtoolRxfhReply, RssError> {
        let to_rss_error = |error| self.ioctl_error("ETHTOOL_GRSSH", error);
        let mut sizes_request = [ETHTOOL_GRSSH, 0, 0, 0, 0, 0];
        execute_ethtool_request(&self.interface, &mut sizes_request).map_err(to_rss_error)?;
        let (entry_count, key_length) =
            (sizes_request[RXFH_INDIR_SIZE_INDEX] as usize, sizes_request[RXFH_KEY_SIZE_INDEX] as usize);
        if entry_count == 0 {
            return Err(RssError::NoIndirectionTable(self.interface.clone()));
        }
        let mut request = vec![0; RXFH_HEADER_WORD_COUNT + entry_count + key_length.div_ceil(4)];
        request[..RXFH_HEADER_WORD_COUNT].copy_from_slice(&sizes_request);
        execute_ethtool_request(&self.interface, &mut request).map_err(to_rss_error)?;
        let [hash_function, input_transform, ..] = request[RXFH_FUNCTION_INDEX].to_ne_bytes();
        let (table, key) = request[RXFH_HEADER_WORD_COUNT..].split_at(entry_count);
        let key: Vec<u8> = key.iter().flat_map(|key_word| key_word.to_ne_bytes()).take(key_length).collect();
        let key = (!key.is_empty()).then_some(key);
        Ok(EthtoolRxfhReply {
            settings: RssSettings { key, indirection_table: table.to_vec(), input_transform },
            hash_function,
        })
    }

    fn unsupported_hash_error(&self, hash_description: &str) -> RssError {
        RssError::UnsupportedHash { interface: self.interface.clone(), found: hash_description.to_owned() }
    }
}

impl RssDevice for EthtoolRssDevice {
    fn settings_source_name(&self) -> &'static str {
        "ethtool"
    }

    fn interface_name(&self) -> &str {
        &self.interface
    }

    fn receive_queue_count(&self) -> u16 {
        let ring_count =
            read_rxnfc_data(&self.interface, ETHTOOL_GRXRINGS, 0).ok().and_then(|rings| u16::try_from(rings).ok());
        ring_count.or_else(|| receive_queue_count(&self.interface).ok()).unwrap_or(1).max(1)
    }

    fn read_unchecked_settings(&self) -> Result<RssSettings, RssError> {
        self.read_rxfh().map(|rxfh_reply| rxfh_reply.settings)
    }

    fn read_config(&self) -> Result<RssConfig, RssError> {
        let rxfh_reply = self.read_rxfh()?;
        // If the driver reports 0, it does not know its hash function. Such drivers support only Toeplitz (igb).
        if rxfh_reply.hash_function != 0 && rxfh_reply.hash_function != ETH_RSS_HASH_TOP {
            return Err(
                self.unsupported_hash_error(&format!("hash function {:#x} (`ethtool -x`)", rxfh_reply.hash_function))
            );
        }
        // If the driver does not report the fields, it hashes the addresses and ports of TCP packets.
        if let Ok(fields) = read_hash_fields(&self.interface, RssFlowType::Tcp4)
            && fields & RXH_ADDRESSES_AND_PORTS != RXH_ADDRESSES_AND_PORTS
        {
            return Err(self.unsupported_hash_error(&format!(
                "fields {fields:#x} of TCP (`ethtool -n {} rx-flow-hash tcp4`)",
                self.interface
            )));
        }
        let fallback_key = if rxfh_reply.settings.key.is_none() { read_netdev_rss_key()? } else { Vec::new() };
        rxfh_reply.settings.to_checked_config(&self.interface, &fallback_key)
    }

    fn table_entry_count(&self) -> Result<usize, RssError> {
        self.read_rxfh().map(|rxfh_reply| rxfh_reply.settings.indirection_table.len())
    }

    fn write_settings(&mut self, settings: &RssSettings) -> Result<(), RssError> {
        // A NIC with a longer key gets trailing zeros, because an IPv4 hash uses only 16 bytes and an IPv6 hash 40.
        let key = match (self.read_rxfh()?.settings.key, &settings.key) {
            (Some(current_key), Some(key)) => {
                let mut key = key.clone();
                key.resize(current_key.len(), 0);
                key
            }
            _ => vec![],
        };
        let to_rss_error = |error| self.ioctl_error("ETHTOOL_SRSSH", error);
        let queue_count = u32::from(self.receive_queue_count());
        // Each request includes the transform, because kernels from 6.8 on switch it off otherwise. Older kernels
        // report 0 and reject any other value.
        let input_transform_word = u32::from_ne_bytes([ETH_RSS_HASH_NO_CHANGE, settings.input_transform, 0, 0]);
        let mut table = &settings.indirection_table[..];
        // A table that equals ethtool_rxfh_indir_default() is set as the default, so that the number of queues can
        // still be changed (`ethtool -L`). This takes a separate request, because kernel 6.1 and later kernels read the
        // key at different offsets after an empty table.
        if !table.is_empty() && table.iter().zip(0..).all(|(queue, entry)| *queue == entry % queue_count) {
            let mut default_table_request = [ETHTOOL_SRSSH, 0, ETH_RXFH_INDIR_DEFAULT, 0, input_transform_word, 0];
            execute_ethtool_request(&self.interface, &mut default_table_request).map_err(to_rss_error)?;
            table = &[];
        }
        if table.is_empty() && key.is_empty() {
            return Ok(());
        }
        let entry_count = if table.is_empty() { ETH_RXFH_INDIR_NO_CHANGE } else { table.len() as u32 };
        let mut request = vec![ETHTOOL_SRSSH, 0, entry_count, key.len() as u32, input_transform_word, 0];
        request.extend(table);
        request.extend(to_key_words(&key));
        execute_ethtool_request(&self.interface, &mut request).map_err(to_rss_error)
    }
}

/// Returns the key's bytes as 32-bit words. The last word is padded with zeros.
fn to_key_words(key: &[u8]) -> impl Iterator<Item = u32> {
    key.chunks(4).map(|chunk| {
        let mut key_word = [0; 4];
        key_word[..chunk.len()].copy_from_slice(chunk);
        u32::from_ne_bytes(key_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_device_that_has_no_rss() {
        let error = EthtoolRssDevice::new("lo").read_config().unwrap_err();
        assert_eq!(error.to_string(), "lo has no RSS indirection table that ethtool shows");
        let error = EthtoolRssDevice::new("nonexistent0").read_config().unwrap_err();
        assert!(error.to_string().starts_with("nonexistent0: ETHTOOL_GRSSH: No such device"), "{error}");
        assert_eq!(EthtoolRssDevice::new("lo").receive_queue_count(), 1);
        assert!(receive_queue_count("a-name-that-is-too-long").is_err());
        assert!(driver_name("nonexistent0").is_err() && hashes_ports("lo", RssFlowType::Udp6).is_none());
        assert_eq!((strips_vlan_tags("lo").ok(), read_private_flag("lo", "flow-director-atr")), (Some(false), None));
    }

    #[test]
    fn netdev_rss_key_has_40_bytes() {
        match read_netdev_rss_key() {
            Ok(key) => assert_eq!(key.len(), NETDEV_RSS_KEY_BYTES),
            Err(error) => assert!(error.to_string().starts_with(NETDEV_RSS_KEY_PATH), "{error}"),
        }
    }
}
