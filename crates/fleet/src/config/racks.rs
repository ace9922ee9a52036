//! Checks of the fleet's and the servers' `racks`, which list the racks that agents may use.

use std::collections::BTreeSet;

use coreward_config::{Name, Reader, Spanned};

use super::unique::UniqueValues;

/// Returns the names on a list of racks, or `None` if there is no list. `known_racks` has the fleet's racks, if it
/// lists any.
pub fn check_rack_names(
    rack_entries: Option<&[Spanned<Name>]>,
    known_racks: Option<&BTreeSet<String>>,
    reader: &mut Reader<'_>,
) -> Option<BTreeSet<String>> {
    let listed_names = rack_entries?;
    let mut unique_names = UniqueValues::new("rack");
    for name in listed_names {
        let Name(rack) = name.get_ref();
        unique_names.insert(Some(rack), &name.span(), reader);
        if let Some(known_racks) = known_racks.filter(|known| !known.contains(rack)) {
            let message = format_args!("rack {rack:?} does not exist: expected one of the fleet's `racks`");
            reader.report_unknown_name(name.span(), message, rack, known_racks.iter().map(String::as_str));
        }
    }
    Some(listed_names.iter().map(|name| name.get_ref().0.clone()).collect())
}

/// Returns the unique names on a list of the fleet, or `None` if there is no list. `value_kind` is the kind of the
/// entries.
pub fn unique_names(
    value_kind: &'static str,
    rack_entries: Option<&[Spanned<Name>]>,
    reader: &mut Reader<'_>,
) -> Option<BTreeSet<String>> {
    let mut unique_values = UniqueValues::new(value_kind);
    for name in rack_entries? {
        unique_values.insert(Some(&name.get_ref().0), &name.span(), reader);
    }
    Some(rack_entries?.iter().map(|name| name.get_ref().0.clone()).collect())
}
