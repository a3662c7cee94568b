// Package datapb is the generated code of Skein's services of data. Package dataapi serves them.
package datapb
