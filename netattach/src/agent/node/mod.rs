//! What the node has to offer the agent, and what the agent prepares there before it serves.
//!
//! | module | what it does |
//! |---|---|
//! | `privileges` | required capabilities |
//! | `kernel_settings` | a writable `/proc/sys` |
//! | `plugin_root`, `plugin_group` | the node's root directory, and a control group, for other plugins |
//! | `check` | what the node offers an agent: `--check` |

pub(super) mod check;
pub(super) mod kernel_settings;
pub(super) mod plugin_group;
pub(super) mod plugin_root;
pub(super) mod privileges;
