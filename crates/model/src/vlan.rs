//! VLANs (IEEE 802.1Q).

/// VLAN of a network segment, or no VLAN (untagged frames).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vlan(u16);

/// Error returned for a VLAN id that is out of range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("VLAN {0}: expected 1 to {max}", max = Vlan::MAX_ID)]
pub struct VlanIdOutOfRange(pub u64);

impl Vlan {
    /// Value for untagged frames, which have no tag, or a tag with only a priority.
    pub const UNTAGGED: Self = Self(0);

    /// Maximum VLAN id (IEEE 802.1Q, Table 9-2).
    pub const MAX_ID: u16 = 4094;

    /// Returns the VLAN with the id `id`. Fails unless `id` is from 1 to 4094.
    pub fn new(id: u64) -> Result<Self, VlanIdOutOfRange> {
        u16::try_from(id).ok().filter(|id| (1..=Self::MAX_ID).contains(id)).map(Self).ok_or(VlanIdOutOfRange(id))
    }

    /// Returns the VLAN with the id `id`, or untagged frames for 0. Fails if `id` is above 4094.
    pub fn from_id_or_untagged(id: u64) -> Result<Self, VlanIdOutOfRange> {
        if id == 0 { Ok(Self::UNTAGGED) } else { Self::new(id) }
    }

    /// Returns the VLAN id, or 0 for untagged frames.
    pub fn id_or_zero(self) -> u16 {
        self.0
    }

    /// Returns the VLAN id, or `None` for untagged frames.
    pub fn id(self) -> Option<u16> {
        self.is_tagged().then_some(self.0)
    }

    /// Returns whether frames of this VLAN have a tag.
    pub fn is_tagged(self) -> bool {
        self != Self::UNTAGGED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_vlan_ids_are_rejected() {
        assert_eq!(Vlan::new(4094).unwrap().id_or_zero(), 4094);
        assert_eq!(Vlan::new(0), Err(VlanIdOutOfRange(0)));
        assert_eq!(Vlan::new(4095).unwrap_err().to_string(), "VLAN 4095: expected 1 to 4094");
        assert_eq!(Vlan::new(65_537), Err(VlanIdOutOfRange(65_537)));
        assert_eq!(Vlan::from_id_or_untagged(0), Ok(Vlan::UNTAGGED));
    }
}
